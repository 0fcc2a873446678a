"""Asks a mesh with tritonclient, over gRPC and over HTTP, as its users do.

The mesh is that of ../doc.go; MESH is its address, host:port, and MESH_HTTP that of
who holds what it answers against the protocol.
"""

from __future__ import annotations

import os
import queue
import time
import unittest
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

PATIENCE = 30.0
SOON = 5.0  # on a busy machine; without a cancel a stream goes on until its deadline
A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.full((1, 16), -1, dtype=np.int32)
EXTENSIONS = ["binary_tensor_data", "generate", "model_configuration", "statistics"]


class Promises:
    """What both clients are promised; a class that is a test says which client."""

    api: Any
    client: Any
    not_found: str
    invalid: str
    unserved: str
    late: str
    unavailable: str

    def tensor(self, name: str, value: np.ndarray, **how: Any) -> Any:
        out = self.api.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
        out.set_data_from_numpy(value, **how)
        return out

    def simple(self, **how: Any) -> Any:
        return self.client.infer("simple", [self.tensor("INPUT0", A), self.tensor("INPUT1", B)], **how)

    def document(self, answer: Any) -> Dict[str, Any]:
        """Returns what an answer says of itself; gRPC's has it as a message."""
        out = answer.get_response()
        if isinstance(out, dict):
            return out
        return {
            "id": out.id,
            "model_name": out.model_name,
            "model_version": out.model_version,
            "outputs": [{"name": o.name, "datatype": o.datatype, "shape": list(o.shape)} for o in out.outputs],
        }

    def test_server_and_models_are_live_and_ready(self) -> None:
        self.assertTrue(self.client.is_server_live())
        self.assertTrue(self.client.is_server_ready())
        self.assertTrue(self.client.is_model_ready("simple"))
        self.assertTrue(self.client.is_model_ready("simple", "1"))

    def test_sums_and_differences_are_right(self) -> None:
        answer = self.simple()
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), A + B)
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), A - B)
        self.assertEqual(answer.as_numpy("OUTPUT0").dtype, np.int32)

    def test_rows_are_a_batch(self) -> None:
        a = np.arange(48, dtype=np.int32).reshape(3, 16)
        answer = self.client.infer("simple", [self.tensor("INPUT0", a), self.tensor("INPUT1", a)])
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), 2 * a)

    def test_the_id_and_the_models_name_come_back(self) -> None:
        said = self.document(self.simple(request_id="mine"))
        self.assertEqual((said["id"], said["model_name"], said["model_version"]), ("mine", "simple", "1"))

    def test_only_requested_outputs_come(self) -> None:
        answer = self.simple(outputs=[self.api.InferRequestedOutput("OUTPUT1")])
        self.assertEqual([o["name"] for o in self.document(answer)["outputs"]], ["OUTPUT1"])
        self.assertIsNone(answer.as_numpy("OUTPUT0"))
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), A - B)

    def test_every_datatype_comes_back_as_it_was(self) -> None:
        values: List[np.ndarray] = [np.array([[1, 0, 1]], dtype=t) for t in ("b1", "i1", "i2", "i4", "i8", "u1", "u2")]
        values += [np.array([[1.5, -2, 65504]], dtype=t) for t in ("f2", "f4", "f8")]
        values += [np.array([0, 2**32 - 1], dtype=np.uint32), np.array([0, 2**64 - 1], dtype=np.uint64)]
        values += [np.array([b"", b"text", b"\x00\xff\n"], dtype=object), np.zeros((0, 4), dtype=np.float32)]
        for value in values:
            with self.subTest(str(value.dtype)):
                answer = self.client.infer("echo", [self.tensor("x", value)])
                np.testing.assert_array_equal(answer.as_numpy("x"), value)
                self.assertEqual(answer.as_numpy("x").dtype, value.dtype)

    def test_a_megabyte_comes_back(self) -> None:
        value = np.arange(1 << 18, dtype=np.float32)
        np.testing.assert_array_equal(self.client.infer("echo", [self.tensor("x", value)]).as_numpy("x"), value)

    def test_metadata_is_that_of_the_worker(self) -> None:
        said = self.metadata("simple")
        self.assertEqual((said["name"], said["versions"]), ("simple", ["1"]))
        for part, names in (("inputs", ["INPUT0", "INPUT1"]), ("outputs", ["OUTPUT0", "OUTPUT1"])):
            self.assertEqual([t["name"] for t in said[part]], names)
            for t in said[part]:
                self.assertEqual((t["datatype"], [int(n) for n in t["shape"]]), ("INT32", [-1, 16]))

    def test_an_unknown_model_is_not_found(self) -> None:
        for ask in (
            lambda: self.client.get_model_metadata("nothing"),
            lambda: self.client.infer("nothing", [self.tensor("x", A)]),
            lambda: self.client.infer("simple", [self.tensor("INPUT0", A)], model_version="2"),
        ):
            self.refused(self.not_found, "no", ask)

    def test_a_tensor_that_does_not_fit_is_refused_with_its_name(self) -> None:
        short = np.arange(15, dtype=np.int32).reshape(1, 15)
        wrong = [self.tensor("INPUT0", short), self.tensor("INPUT1", B)]
        self.refused(self.invalid, "INPUT0", lambda: self.client.infer("simple", wrong))
        typed = [self.tensor("INPUT0", A), self.tensor("INPUT1", B.astype(np.float32))]
        self.refused(self.invalid, "INPUT1", lambda: self.client.infer("simple", typed))
        self.refused(self.invalid, "INPUT1", lambda: self.client.infer("simple", [self.tensor("INPUT0", A)]))

    def test_a_parameter_timeout_ends_the_request(self) -> None:
        microseconds = 200_000
        self.refused(
            self.late, "no answer", lambda: self.client.infer("slow", [self.tensor("x", A)], timeout=microseconds)
        )

    def test_a_classification_is_refused_rather_than_left_out(self) -> None:
        outputs = [self.api.InferRequestedOutput("OUTPUT0", class_count=2)]
        self.refused(self.unserved, "classification", lambda: self.simple(outputs=outputs))

    def test_models_are_listed_loaded_and_unloaded(self) -> None:
        self.client.load_model("one")
        self.assertEqual(self.states()["one"], "READY")
        self.client.load_model("two")
        self.assertTrue(self.client.is_model_ready("two"))
        self.client.unload_model("two")
        states = self.states()
        self.assertEqual((states["one"], states["two"]), ("READY", "UNAVAILABLE"))
        self.client.unload_model("one", unload_dependents=True)
        self.assertEqual(self.states()["one"], "UNAVAILABLE")
        deadline = time.monotonic() + PATIENCE
        while self.states()["one"] != "READY":  # a host that unloads it still may answer from it
            np.testing.assert_array_equal(self.client.infer("first", [self.tensor("x", A)]).as_numpy("x"), A)
            self.assertLess(time.monotonic(), deadline)

    def test_a_model_that_cannot_be_loaded_is_refused_with_the_reason(self) -> None:
        self.refused(self.unavailable, "no such file", lambda: self.client.load_model("broken"))
        self.refused(self.not_found, "nothing", lambda: self.client.load_model("nothing"))
        self.refused(self.unserved, "never changes", lambda: self.client.load_model("one", config="{}"))

    def test_statistics_count_requests(self) -> None:
        def simple() -> Dict[str, Any]:
            (out,) = self.statistics("simple")
            return out

        self.simple()
        before = simple()
        self.simple()
        after = simple()
        for name in ("success", "queue", "compute_infer"):
            counts = [int(s["inference_stats"][name]["count"]) for s in (before, after)]
            self.assertEqual(counts[1] - counts[0], 1, name)
        self.assertEqual(int(after["inference_count"]) - int(before["inference_count"]), 1)
        took = [int(s["inference_stats"]["success"]["ns"]) for s in (before, after)]
        self.assertGreater(took[1], took[0])
        self.assertLess(abs(int(after["last_inference"]) / 1000 - time.time()), PATIENCE)
        self.assertIn("simple", [s["name"] for s in self.statistics("")])
        self.refused(self.not_found, "nothing", lambda: self.statistics("nothing"))

    def test_the_configuration_has_the_inputs(self) -> None:
        config = self.config("simple")
        inputs = [(i["name"], i["data_type"]) for i in config["input"]]
        self.assertEqual(inputs, [("INPUT0", "TYPE_INT32"), ("INPUT1", "TYPE_INT32")])
        self.assertEqual(len(config["output"]), 2)

    def states(self) -> Dict[str, str]:
        """Returns the states of the models by their names."""
        return {m["name"]: m["state"] for m in self.index()}

    def refused(self, status: str, text: str, ask: Callable[[], Any]) -> None:
        with self.assertRaisesRegex(InferenceServerException, text) as caught:
            ask()
        self.assertEqual(caught.exception.status(), status)


class GRPCTest(Promises, unittest.TestCase):
    api = tritonclient.grpc
    not_found = "StatusCode.NOT_FOUND"
    invalid = "StatusCode.INVALID_ARGUMENT"
    unserved = "StatusCode.UNIMPLEMENTED"
    late = "StatusCode.DEADLINE_EXCEEDED"
    unavailable = "StatusCode.UNAVAILABLE"

    def setUp(self) -> None:
        self.client = tritonclient.grpc.InferenceServerClient(os.environ["MESH"])
        self.addCleanup(self.client.close)

    def index(self) -> List[Dict[str, Any]]:
        return self.client.get_model_repository_index(as_json=True)["models"]

    def metadata(self, name: str) -> Dict[str, Any]:
        return self.client.get_model_metadata(name, as_json=True)

    def statistics(self, name: str) -> List[Dict[str, Any]]:
        return self.client.get_inference_statistics(name, as_json=True)["model_stats"]

    def config(self, name: str) -> Dict[str, Any]:
        return self.client.get_model_config(name, as_json=True)["config"]

    def test_the_server_says_its_name(self) -> None:
        said = self.client.get_server_metadata()
        self.assertEqual((said.name, list(said.extensions)), ("stagemesh", EXTENSIONS))

    def test_an_unknown_model_is_not_ready_by_an_error(self) -> None:
        self.refused(self.not_found, "nothing", lambda: self.client.is_model_ready("nothing"))

    def test_a_deadline_of_the_client_ends_the_request(self) -> None:
        self.refused(
            self.late,
            "Deadline|no answer",
            lambda: self.client.infer("slow", [self.tensor("x", A)], client_timeout=0.2),
        )

    def test_a_compressed_request_is_read(self) -> None:
        answer = self.simple(compression_algorithm="gzip")
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), A + B)

    def test_requests_overtake_each_other(self) -> None:
        answers: queue.Queue[Tuple[Any, Optional[Exception]]] = queue.Queue()
        for i in range(20):
            value = np.full((1, 16), i, dtype=np.int32)
            inputs = [self.tensor("INPUT0", value), self.tensor("INPUT1", value)]
            self.client.async_infer(
                "simple", inputs, lambda result, error: answers.put((result, error)), request_id=str(i)
            )
        seen = set()
        for _ in range(20):
            result, error = answers.get(timeout=PATIENCE)
            self.assertIsNone(error)
            i = int(result.get_response().id)
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.full((1, 16), 2 * i))
            seen.add(i)
        self.assertEqual(seen, set(range(20)))


class HTTPTest(Promises, unittest.TestCase):
    api = tritonclient.http
    not_found = "404"
    invalid = "400"
    unserved = "501"
    late = "504"
    unavailable = "503"

    def setUp(self) -> None:
        self.client = tritonclient.http.InferenceServerClient(os.environ["MESH_HTTP"], concurrency=4)
        self.addCleanup(self.client.close)

    def index(self) -> List[Dict[str, Any]]:
        return self.client.get_model_repository_index()

    def metadata(self, name: str) -> Dict[str, Any]:
        return self.client.get_model_metadata(name)

    def statistics(self, name: str) -> List[Dict[str, Any]]:
        return self.client.get_inference_statistics(name)["model_stats"]

    def config(self, name: str) -> Dict[str, Any]:
        return self.client.get_model_config(name)

    def test_the_server_says_its_name(self) -> None:
        said = self.client.get_server_metadata()
        self.assertEqual((said["name"], said["extensions"]), ("stagemesh", EXTENSIONS))

    def test_an_unknown_model_is_not_ready(self) -> None:
        self.assertFalse(self.client.is_model_ready("nothing"))

    def test_json_and_bytes_mix(self) -> None:
        want = {"OUTPUT0": A + B, "OUTPUT1": A - B}
        for into in ((False, False), (True, False), (False, True)):
            for out in ((False, False), (True, False), (False, True)):
                with self.subTest(into=into, out=out):
                    inputs = [
                        self.tensor(name, value, binary_data=binary)
                        for name, value, binary in zip(("INPUT0", "INPUT1"), (A, B), into)
                    ]
                    outputs = [
                        tritonclient.http.InferRequestedOutput(name, binary_data=binary)
                        for name, binary in zip(want, out)
                    ]
                    answer = self.client.infer("simple", inputs, outputs=outputs)
                    for name, value in want.items():
                        np.testing.assert_array_equal(answer.as_numpy(name), value)
                    for output, binary in zip(answer.get_response()["outputs"], out):
                        self.assertEqual("data" not in output, binary)

    def test_text_goes_as_json(self) -> None:
        value = np.array(["", "Größe", "a\nb"], dtype=object)
        outputs = [tritonclient.http.InferRequestedOutput("x", binary_data=False)]
        answer = self.client.infer("echo", [self.tensor("x", value, binary_data=False)], outputs=outputs)
        self.assertEqual(answer.get_response()["outputs"][0]["data"], list(value))

    def test_requests_run_beside_each_other(self) -> None:
        asked = []
        for i in range(20):
            value = np.full((1, 16), i, dtype=np.int32)
            inputs = [self.tensor("INPUT0", value), self.tensor("INPUT1", value)]
            asked.append(self.client.async_infer("simple", inputs))
        for i, answer in enumerate(asked):
            np.testing.assert_array_equal(
                answer.get_result(timeout=PATIENCE).as_numpy("OUTPUT0"), np.full((1, 16), 2 * i)
            )


class StreamTest(unittest.TestCase):
    """What tritonclient's stream is promised: requests side by side, each answered in chunks."""

    def setUp(self) -> None:
        self.client = tritonclient.grpc.InferenceServerClient(os.environ["MESH"])
        self.addCleanup(self.client.close)
        self.answers: queue.Queue[Tuple[Any, Optional[InferenceServerException]]] = queue.Queue()
        self.open()
        self.addCleanup(self.client.stop_stream)

    def open(self) -> None:
        self.client.start_stream(callback=lambda result, error: self.answers.put((result, error)))

    def text(self, words: str) -> Any:
        out = tritonclient.grpc.InferInput("text", [1], "BYTES")
        out.set_data_from_numpy(np.array([words.encode()], dtype=object))
        return out

    def ask(self, words: str, name: str = "", **how: Any) -> None:
        self.client.async_stream_infer("words", [self.text(words)], request_id=name, **how)

    def next(self) -> Tuple[str, Optional[str], bool]:
        """Returns the next message: its request's id, its word or None, and whether it is the last."""
        result, error = self.answers.get(timeout=PATIENCE)
        self.assertIsNone(error)
        said, word = result.get_response(), result.as_numpy("word")
        final = said.parameters["triton_final_response"].bool_param
        self.assertEqual(said.model_name, "words")
        return said.id, None if word is None else word[0].decode().strip(), final

    def cancelled(self) -> int:
        answer = self.client.infer("words", [self.text("cancelled?")])
        return int(answer.as_numpy("word")[0])

    def test_requests_run_side_by_side_and_each_gets_its_words_in_order(self) -> None:
        many = 8
        asked = {str(i): [f"{i}-{at}" for at in range(12)] for i in range(many)}
        for name, words in asked.items():
            # None of them goes on before all of them have begun.
            self.ask(" ".join([f"meet:{many}", *words]), name, enable_empty_final_response=True)
        got: Dict[str, List[Optional[str]]] = {name: [] for name in asked}
        open_ones = set(asked)
        while open_ones:
            name, word, final = self.next()
            self.assertIn(name, open_ones)
            got[name].append(word)
            if final:
                open_ones.remove(name)
        for name, words in asked.items():
            self.assertEqual(got[name], [f"meet:{many}", *words, None])

    def test_only_who_asks_for_it_gets_an_empty_final_response(self) -> None:
        self.ask("a b", "with", enable_empty_final_response=True)
        got = [self.next() for _ in range(3)]
        self.assertEqual(got, [("with", "a", False), ("with", "b", False), ("with", None, True)])
        self.ask("c", "without")
        self.assertEqual(self.next(), ("without", "c", False))
        # Had there been one more message it would come before these.
        self.ask("d", "after", enable_empty_final_response=True)
        self.assertEqual([self.next() for _ in range(2)], [("after", "d", False), ("after", None, True)])

    def test_an_error_ends_its_request_and_not_the_stream(self) -> None:
        self.ask("a fail b", "bad", enable_empty_final_response=True)
        self.assertEqual(self.next(), ("bad", "a", False))
        result, error = self.answers.get(timeout=PATIENCE)
        self.assertIsNone(result)
        self.assertRegex(str(error), "INVALID_INPUT: .*says fail")
        self.client.async_stream_infer("nothing", [self.text("a")], request_id="unknown")
        result, error = self.answers.get(timeout=PATIENCE)
        self.assertIsNone(result)
        self.assertRegex(str(error), "UNKNOWN_PIPELINE: .*nothing")
        self.ask("c", "good", enable_empty_final_response=True)
        self.assertEqual([self.next() for _ in range(2)], [("good", "c", False), ("good", None, True)])

    def test_an_answer_without_chunks_is_one_message(self) -> None:
        inputs = []
        for name, value in (("INPUT0", A), ("INPUT1", B)):
            inputs.append(tritonclient.grpc.InferInput(name, [1, 16], "INT32").set_data_from_numpy(value))
        self.client.async_stream_infer("simple", inputs, request_id="sum", enable_empty_final_response=True)
        result, error = self.answers.get(timeout=PATIENCE)
        self.assertIsNone(error)
        self.assertTrue(result.get_response().parameters["triton_final_response"].bool_param)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)

    def test_who_does_not_stream_gets_all_words_together(self) -> None:
        answer = self.client.infer("words", [self.text("one two three")])
        self.assertEqual(answer.as_numpy("word")[0], b"one two three ")

    def test_a_stream_that_is_cancelled_stops_its_worker(self) -> None:
        before = self.cancelled()
        self.ask("forever", "long")
        self.assertEqual(self.next(), ("long", "forever", False))
        self.client.stop_stream(cancel_requests=True)
        late = time.monotonic() + SOON
        while self.cancelled() == before:
            self.assertLess(time.monotonic(), late, "the worker goes on")
        # The client has another one after that.
        self.answers = queue.Queue()
        self.open()
        self.ask("a", "again")
        self.assertEqual(self.next(), ("again", "a", False))


if __name__ == "__main__":
    unittest.main()

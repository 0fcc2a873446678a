"""Running a worker without a mesh, and the check of workers."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
from typing import Any, List
from unittest import mock

import numpy as np

from stagemesh import Bytes, InvalidInput, Tensor, Worker, check, testing
from stagemesh.lifecycle import NotFound, target_of
from stagemesh.testing import BatchFailed, WorkerEnded, WorkerSilent

from .support import ROOT, alive, eventually


class Scale(Worker):
    """Scales; found by name from another process."""

    inputs = {"x": Tensor("FP32", [-1, 2])}
    outputs = {"y": Tensor("FP32", [-1, 2])}
    examples = [{"x": [1, 2]}]

    def setup(self, ctx: Any) -> None:
        self.by = np.float32(ctx.options.get("by", 1))

    def predict(self, batch: Any) -> Any:
        for i, item in enumerate(batch.items):
            if item["x"][0, 0] < 0:
                batch.fail(i, InvalidInput("x", "is negative"))
            if item["x"][0, 0] == 666:
                os._exit(7)
        return {"y": batch["x"] * self.by}


class TestingTest(unittest.TestCase):
    def test_process_and_thread_give_the_same(self) -> None:
        for process in (True, False):
            with self.subTest(process=process), testing.run(Scale, {"by": 3}, process=process) as w:
                self.assertEqual(w.predict({"x": [1, 2]})["y"].tolist(), [[3, 6]])
                self.assertEqual(w.add({"x": np.ones((2, 2), "float32")}), 0)
                self.assertEqual(w.add({"x": [-1, 0]}, parameters={"a": 1}), 1)
                first, second = w.predict()
                self.assertEqual(first["y"].shape, (2, 2))
                with self.assertRaisesRegex(InvalidInput, "x: is negative"):
                    second["y"]
                with self.assertRaises(InvalidInput):
                    w.predict({"x": [-1, 0]})
                self.assertEqual(w.examples[0]["x"].tolist(), [[1, 2]])
                self.assertEqual(w.stop(), 0)
                self.assertEqual(w.stop(), 0)

    def test_crash_is_reported(self) -> None:
        with testing.run(Scale) as w:
            with self.assertRaisesRegex(WorkerEnded, "its process exited with 7"):
                w.predict({"x": [666, 0]})

    def test_failed_start_is_reported(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "w.py")
            with open(path, "w") as file:
                file.write("raise SystemExit('broken')")
            with self.assertRaisesRegex(WorkerEnded, "exited with 1"):
                testing.run(path, stderr=subprocess.DEVNULL).start()

    def test_wrong_inputs_are_refused_before_sending(self) -> None:
        with testing.run(Scale, process=False) as w:
            for inputs, want in (
                ({"x": [1, 2, 3]}, "input 'x': got shape"),
                ({"x": np.zeros((1, 2))}, "float64, expected FP32"),
            ):
                with self.assertRaisesRegex(ValueError, want):
                    w.predict(inputs)
            with self.assertRaisesRegex(ValueError, "add requests first"):
                w.predict()

    def test_requests_that_no_host_sends_are_refused(self) -> None:
        with testing.run(Scale, process=False) as w:
            none: Any = np.zeros((0, 2), "float32")
            for inputs, request, want in (
                ({"x": none}, {}, "rows is a whole number from 1"),
                ({"x": [1, 2]}, {"parameters": {"top": [1]}}, "parameters are booleans"),
                ({"x": [1, 2]}, {"timeout": -1}, "timeout is whole milliseconds"),
                ({"x": [1, 2]}, {"metadata": {"n": 1}}, "metadata are strings"),
            ):
                with self.subTest(want), self.assertRaisesRegex(ValueError, want):
                    w.predict(inputs, **request)
            w.add({"x": [1, 2]}, parameters={"a": np.float64(1)})
            self.assertEqual(w.predict()[0]["y"].tolist(), [[1, 2]])
            for batch in (1, 99):
                with self.assertRaisesRegex(ValueError, "was not sent, or its result was taken"):
                    w.result(batch)

    def test_class_that_no_host_starts_is_refused_in_a_thread(self) -> None:
        class Both(Scale):
            def predict_item(self, item: Any) -> Any:
                return {}

        with self.assertRaisesRegex(ValueError, "both predict and predict_item"):
            testing.run(Both, process=False).start()

    def test_stream_that_fails_keeps_its_error(self) -> None:
        class Silent(Worker):
            inputs = {"x": Tensor("FP32", [2])}
            outputs = {"y": Tensor("FP32", [-1])}

            def stream(self, item: Any) -> Any:
                yield {"y": [1]}
                go_on.wait(30)

        go_on = threading.Event()
        cancels = mock.patch.object(testing.Stream, "cancel")
        with testing.run(Silent, process=False, patience_s=0.5) as w, cancels as cancel:
            with self.assertRaises(WorkerSilent), w.stream({"x": [1, 2]}) as stream:
                for _ in stream:
                    pass
            cancel.assert_not_called()
            go_on.set()

    def test_worker_that_reads_nothing_is_named(self) -> None:
        class Echo(Worker):
            inputs = {"x": Bytes()}
            outputs = {"y": Bytes()}

            def predict(self, batch: Any) -> Any:
                return {"y": batch["x"]}

        with testing.run(Echo, process=False, patience_s=2) as w:
            with self.assertRaisesRegex(WorkerSilent, "read nothing for 2 s: take the results"):
                for _ in range(4):  # a result that nobody takes fills the buffers of the socket
                    w.send([testing.Request({"x": bytes(16 << 20)})])

    def test_undeclared_inputs_are_named(self) -> None:
        with testing.run(Scale, process=False) as w:
            for value in (3, "a", [[1]]):
                with self.assertRaisesRegex(ValueError, "input 'nope' is not declared; inputs are 'x'"):
                    w.predict({"nope": value})

    def test_ended_worker_is_reported_by_every_call(self) -> None:
        class Anything(Worker):
            def predict(self, batch: Any) -> Any:
                return {}

        with testing.run(Anything, process=False) as w, self.assertRaisesRegex(ValueError, "axis 0 of a tensor is row"):
            w.predict({"nope": np.float32(3)})
        asks: List[Any] = [lambda: w.predict({"x": [1, 2]}), lambda: w.tell("cancel", batch=1), lambda: w.ping()]
        w = testing.run(Scale)
        for ask in asks:
            with self.assertRaisesRegex(WorkerEnded, "not started"):
                ask()
        w.start()
        assert w.process is not None
        w.process.kill()
        w.process.wait()
        for ask in asks:
            with self.assertRaisesRegex(WorkerEnded, "ended by SIGKILL"):
                ask()
        w.stop()
        for ask in asks:
            with self.assertRaisesRegex(WorkerEnded, "ended by SIGKILL"):
                ask()

    def test_several_batches_may_run_at_once(self) -> None:
        class Slots(Scale):
            concurrency = 3

            def setup(self, ctx: Any) -> None:
                super().setup(ctx)
                self.all = threading.Barrier(3, timeout=30)

            def predict(self, batch: Any) -> Any:
                self.all.wait()
                return super().predict(batch)

        with testing.run(Slots, process=False, slots=5) as w:
            self.assertEqual(w.slots, 3)
            batches = [w.send([testing.Request({"x": [i, i]})] * (i + 1)) for i in range(3)]
            for i, batch in reversed(list(enumerate(batches))):
                self.assertEqual([o["y"].tolist() for o in w.result(batch)], [[[i, i]]] * (i + 1))

    def test_arrays_are_those_of_the_files_serve(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "w.py")
            for arrays, kind in (("buffer", memoryview), ("numpy", np.ndarray)):
                with open(path, "w") as file:
                    file.write(
                        "from stagemesh import *\n"
                        "class Same(Worker):\n"
                        '    inputs = outputs = {"x": Tensor("FP32", [-1, 2])}\n'
                        '    def predict(self, batch):\n        return {"x": batch["x"]}\n'
                        f'if __name__ == "__main__":\n    serve(Same, arrays="{arrays}")\n'
                    )
                with testing.run(path) as w:
                    self.assertIsInstance(w.predict({"x": [1, 2]})["x"], kind)

    def test_failed_batch_is_reported(self) -> None:
        with testing.run(Scale, process=False) as w, self.assertRaisesRegex(BatchFailed, "KeyError"):
            w.predict({})

    def test_local_classes_need_this_process(self) -> None:
        class Local(Scale):
            pass

        with self.assertRaisesRegex(NotFound, "process=False"):
            testing.run(Local).start()
        with testing.run(Local, process=False) as w:
            w.predict({"x": [1, 2]})

    def test_worker_ends_with_the_test_process(self) -> None:
        source = f"""
            import os, sys
            sys.path[:0] = {sys.path!r}
            from stagemesh import testing
            w = testing.run({target_of(Scale)!r}).start()
            print(w.process.pid, flush=True)
            os._exit(0)
        """
        out = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, check=True)
        eventually(lambda: not alive(int(out.stdout)), "the worker ends", 2)


class CheckTest(unittest.TestCase):
    def check(self, body: str, *arguments: str) -> Any:
        """Returns the exit code and the output of a check of Worker W with this body."""
        source = (
            "import os, sys, threading, time\nimport numpy as np\nfrom stagemesh import *\n\n"
            'class W(Worker):\n    inputs = {"x": Tensor("FP32", [-1, 2])}\n'
            '    outputs = {"y": Tensor("FP32", [-1, 2])}\n' + textwrap.indent(textwrap.dedent(body), "    ")
        )
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "w.py")
            with open(path, "w") as file:
                file.write(source)
            command = [sys.executable, "-m", "stagemesh.check", path, "--max-size=4", *arguments]
            environ = {**os.environ, "PYTHONPATH": ROOT}
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        self.errors = done.stderr
        return done.returncode, done.stdout

    def test_good_worker_passes_all_checks(self) -> None:
        code, out = self.check(
            """
            def predict(self, batch):
                print("noise")
                for i, item in enumerate(batch.items):
                    if not np.isfinite(item["x"]).all():
                        batch.fail(i, InvalidInput("x", "is not finite"))
                return {"y": batch["x"]}
            """
        )
        self.assertEqual(code, 0, out)
        lines = out.splitlines()
        self.assertEqual(len(lines), 12)
        self.assertIn("2 of 2 kinds refused", out)
        self.assertEqual(lines[-1], "nothing is wrong")

    def test_batches_have_no_more_rows_than_a_host_sends(self) -> None:
        body = """
            def setup(self, ctx):
                self.buffer = np.empty((ctx.max_size, 2), "float32")
            def predict(self, batch):
                x = self.buffer[:batch.rows]
                x[:] = batch["x"]
                return {"y": x.copy()}
            """
        for size in ("1", "2", "3"):
            code, out = self.check(body, f"--max-size={size}")
            self.assertEqual(code, 0, out)

    def test_optional_input_need_not_be_in_an_example(self) -> None:
        code, out = self.check(
            """
            inputs = {"x": Tensor("FP32", [-1, 2]), "mask": Tensor("FP32", [-1, 2], optional=True)}
            examples = [{"x": [1, 2]}]
            def predict(self, batch):
                return {"y": batch["x"]}
            """
        )
        self.assertEqual(code, 0, out)

    def test_models_with_inputs_of_their_own_are_reloaded(self) -> None:
        code, out = self.check(
            """
            models = ModelLimits()
            def load(self, model):
                spec = Tensor("FP32", [-1, 2])
                model.inputs, model.outputs = {model.source: spec}, {"y": spec}
                return model.source
            def predict(self, batch):
                return {"y": batch[batch.model]}
            """,
            "--model=a=x",
            "--model=b=z",
        )
        self.assertEqual(code, 0, out)
        self.assertIn("a, b", out)

    def test_options_reach_setup(self) -> None:
        body = """
            def setup(self, ctx):
                assert ctx.options == {"a": [1]} and ctx.max_size == 4
            def predict(self, batch):
                return {"y": batch["x"]}
            """
        self.assertEqual(self.check(body, '--options={"a": [1]}')[0], 0)
        self.assertEqual(self.check(body)[0], 1)

    def wrong(self, body: str, *want: str) -> None:
        code, out = self.check(body, "--patience=20")
        self.assertEqual(code, 1, out)
        for text in want:
            self.assertIn(text, out)
        self.assertIn("      -> ", out)

    def test_findings_name_the_problem(self) -> None:
        cases: List[Any] = [
            (
                "def predict(self, batch):\n    return {'y': batch['x'].astype(float)}",
                "WRONG answers its examples",
                "use .astype(numpy.float32)",
            ),
            (
                "def predict(self, batch):\n    return {'y': batch['x'][:1]}",
                "WRONG answers a full batch",
                "got shape [1, 2], expected [4, 2]",
            ),
            (
                "def predict(self, batch):\n    assert np.isfinite(batch['x']).all()\n    return {'y': batch['x']}",
                "WRONG bad input is the fault of its item alone",
                "NaN failed the batch as a whole",
                "batch.fail(i, InvalidInput('x', ...))",
            ),
            (
                "def predict(self, batch):\n    if 'x' not in batch: os._exit(1)\n    return {'y': batch['x']}",
                "WRONG goes on after a batch that raises",
                "its process exited with 1",
            ),
            (
                "def predict(self, batch):\n    return {'y': batch['x']}\ndef teardown(self):\n    raise SystemExit(3)",
                "WRONG leaves on shutdown",
                "it exited with 3",
            ),
            ("def predict(self, batch):\n    yield {}", "WRONG starts", "exited with 1"),
            (
                "inputs = {}\ndef predict(self, batch):\n    return {'y': batch['x']}",
                "WRONG starts",
                "declares no inputs",
            ),
            (
                "examples = [{'x': [9, 9]}]\ndef predict_item(self, item):\n    raise InvalidInput('x', 'is 9')",
                "example 1: x: is 9",
            ),
        ]
        for body, *want in cases:
            with self.subTest(want[-1]):
                self.wrong(body, *want)

    def test_setup_error_starts_in_the_workers_file(self) -> None:
        _, out = self.check("def setup(self, ctx):\n    ctx.options['model']\ndef predict(self, batch):\n    pass")
        self.assertIn("WRONG starts", out)
        self.assertIn("exited with 1: KeyError: 'model'", out)
        self.assertIn("in setup", out)
        self.assertNotIn("session.py", out)

    def test_invalid_declaration_is_one_sentence(self) -> None:
        _, out = self.check("outputs = {'y': Tensor('FP32', [2])}\ndef predict(self, batch):\n    pass")
        self.assertRegex(out, r"WRONG starts\n      .*axis 0 is rows.*\n      -> declare what can be served")

    def test_hanging_worker_is_ended_with_a_traceback(self) -> None:
        code, out = self.check("def predict(self, batch):\n    while True:\n        pass", "--patience=1")
        self.assertEqual(code, 1)
        self.assertIn("WRONG answers its examples\n      the worker sent nothing for 1 s", out)
        self.assertRegex(self.errors, r"most recent call first.*\n.*line \d+ in predict")
        self.assertIn("ok    leaves on shutdown", out)

    def test_dependent_checks_are_skipped(self) -> None:
        _, out = self.check("def predict(self, batch):\n    return {'y': batch['x'][:1]}")
        self.assertNotIn("WRONG bad input", out)
        self.assertIn("not checked, since an item is not answered among others: bad input is the fault of its", out)

    def test_unusable_example_is_a_finding(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "w.py")
            with open(path, "w") as file:
                file.write(
                    "from stagemesh import *\n"
                    "class W(Worker):\n"
                    '    arrays = "buffer"\n'
                    # Inputs whose rows the check makes differently, since one has any.
                    '    inputs = {"x": Tensor("FP32", [-1]), "y": Tensor("FP32", [-1, 2])}\n'
                    '    outputs = {"y": Tensor("FP32", [-1, 2])}\n'
                    '    examples = [{"x": [1], "y": [[1, 2], [3, 4]]}]\n'
                    '    def predict(self, batch):\n        return {"y": batch["y"]}\n'
                )
            with mock.patch.object(tempfile, "tempdir", folder), contextlib.redirect_stdout(io.StringIO()) as out:
                self.assertEqual(check.main([path, "--max-size=4"]), 1)
            left = [name for name in os.listdir(folder) if name.startswith("stagemesh-")]
        self.assertIn("WRONG answers its examples\n      it cannot be tested: ValueError: request 0", out.getvalue())
        self.assertIn("ok    leaves on shutdown", out.getvalue())
        self.assertEqual(left, [])

    def test_streaming_worker_is_checked_by_chunks(self) -> None:
        body = """
            outputs = {{"y": Tensor("FP32", [-1])}}
            inputs = {{"x": Tensor("FP32", [2])}}
            def stream(self, item):
                for x in item["x"]:
                    yield {{"y": [{0}]}}
                    {1}
            """
        code, out = self.check(body.format("x", "pass"))
        self.assertEqual(code, 0, out)
        self.assertRegex(out, r"ok    streams its examples: 2 chunks, the first after \d+\.\d ms, all after")
        self.assertIn("ok    stops a stream that is cancelled", out)
        self.assertNotIn("full batch", out)
        self.wrong(body.format("'a'", "pass"), "WRONG answers its examples", "chunk 1: output 'y'")
        slow = body.format("x", "time.sleep(1.2)")
        self.wrong(slow, "WRONG stops a stream that is cancelled", "after the cancel")
        self.wrong(
            body.format("x", "return 1/0"),
            "WRONG answers its examples",
            "could not run this item\n      ZeroDivisionError",
        )

    def test_slots_are_checked_at_a_time(self) -> None:
        body = """
            concurrency = 3
            busy = False
            def predict(self, batch):
                assert not self.busy{0}
                self.busy = True
                time.sleep(0.1)
                self.busy = False
                return {{"y": batch["x"]}}
            """
        self.wrong(body.format(""), "WRONG answers batches at a time", "of 3 batches at a time are not answered")
        _, out = self.check(body.format(" or True"))
        self.assertIn("ok    answers batches at a time: 3", out)

    def test_wrong_arguments_exit_with_2(self) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            self.assertEqual(check.main(["/no/such.py"]), 2)
        self.assertIn("there is no such file", errors.getvalue())
        for wrong in ("--options=[1", "--options=[1]", "--max-size=0", "--patience=0"):
            with contextlib.redirect_stderr(io.StringIO()) as errors, self.assertRaises(SystemExit) as end:
                check.main(["w.py", wrong])
            self.assertEqual(end.exception.code, 2)
            self.assertIn(wrong.partition("=")[0], errors.getvalue())


if __name__ == "__main__":
    unittest.main()

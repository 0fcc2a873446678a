"""Failures of a worker process: violations, failed starts, exit codes."""

from __future__ import annotations

import keyword
import os
import signal
import struct
import subprocess
import sys
import tempfile
import unittest
from typing import Any, Dict, List

from .support import DOUBLE, ROOT, Host, floats, frame


def start(source: str, *arguments: str, **environ: str) -> Any:
    """Runs ``python -m stagemesh`` as a person does, for a file of this source, and returns how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "w.py")
        with open(path, "w") as file:
            file.write(source)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("STAGEMESH_")}
        command = [sys.executable, "-m", "stagemesh", *(arguments or (path,))]
        return subprocess.run(
            command,
            env={**clean, "PYTHONPATH": ROOT, **environ},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            capture_output=True,
            text=True,
            timeout=30,
        )


class FailuresTest(unittest.TestCase):
    def test_violations_end_the_process(self) -> None:
        part = {"name": "x", "datatype": "FP32", "shape": [1, 2], "at": 0, "size": 8}

        def predict(**changes: Any) -> bytes:
            header: Dict[str, Any] = {"type": "predict", "batch": 1, "items": [{"id": "a"}], "parts": [part]}
            header.update(changes)
            return frame({k: v for k, v in header.items() if v is not None}, floats(1, 2))

        for name, data, want in (
            ("garbage", b"GET / HTTP/1.1\r\n\r\n", "begins with 47 45 54 20"),
            ("an unknown type", frame({"type": "chat"}), "'chat' that does not fit the moment"),
            (
                "another welcome",
                frame({"type": "welcome", "protocol": 1, "options": {}, "max_frame": 1}),
                "'welcome' that does not fit",
            ),
            ("a body that is too long", struct.pack("<4sIQ", b"SMW1", 20, 1 << 40), "at most"),
            ("no items", predict(items=[]), "items is a list of at least one"),
            ("an item without an id", predict(items=[{}]), "items[0]: expected an object with an id"),
            ("rows of another type", predict(items=[{"id": "a", "rows": 1.5}]), "rows is a whole number"),
            (
                "parameters of another type",
                predict(items=[{"id": "a", "parameters": {"p": []}}]),
                "parameters are booleans",
            ),
            ("metadata of another type", predict(items=[{"id": "a", "metadata": {"p": 1}}]), "metadata are strings"),
            ("a timeout of another type", predict(items=[{"id": "a", "timeout": "1s"}]), "timeout is whole"),
            (
                "rows that do not add up",
                predict(items=[{"id": "a"}, {"id": "b"}]),
                "shape [1, 2], the items have 2 rows",
            ),
            ("a batch of another type", predict(batch="1"), "batch is a whole number"),
            ("no parts", predict(parts=None), "no parts"),
            ("a part outside the body", predict(parts=[{**part, "at": 1}]), "bytes 1 to 9 of a body of 8"),
            ("a part before the body", predict(parts=[{**part, "at": -1}]), "bytes -1"),
            ("a size that does not fit", predict(parts=[{**part, "shape": [1, 3]}]), "takes 12 bytes, got 8"),
            ("an unknown datatype", predict(parts=[{**part, "datatype": "FP8"}]), "unknown datatype 'FP8'"),
            ("a negative extent", predict(parts=[{**part, "shape": [-1, 2]}]), "an extent that is not valid"),
            ("an item that is none", predict(parts=[{**part, "item": 1}]), "item 1, expected 0 to 0"),
            ("a part twice", predict(parts=[part, part]), "more than once"),
            ("another place", predict(parts=[{**part, "place": "shm"}]), "place 'shm'"),
            ("a cancel of another type", frame({"type": "cancel", "batch": 1, "items": 3}), "items is a list"),
            ("a ping without a number", frame({"type": "ping"}), "n is a whole number"),
        ):
            with self.subTest(name), Host(DOUBLE) as host:
                host.ready()
                host.sock.sendall(data)
                error, _ = host.expect("error")
                self.assertEqual((error["kind"], "batch" in error), ("protocol", False))
                self.assertIn(want, error["message"])
                self.assertTrue(host.ended())
                self.assertEqual(host.exit_code(), 4)
                self.assertIn("does not keep to the worker protocol", host.stderr())
                self.assertIn(want, host.stderr())
                self.assertNotIn("Traceback", host.stderr())

    def test_end_within_a_frame_exits_with_3(self) -> None:
        with Host(DOUBLE) as host:
            host.ready()
            host.sock.sendall(frame({"type": "ping", "n": 1})[:20])
            host.sock.close()
            self.assertEqual(host.exit_code(), 3)
            self.assertIn("in the middle of a frame", host.stderr())

    def test_unsupported_protocol_exits_with_4(self) -> None:
        with Host(DOUBLE) as host:
            host.expect("hello")
            host.send({"type": "error", "kind": "protocol", "error": "Version", "message": "this host speaks 2 and 3"})
            self.assertEqual(host.exit_code(), 4)
            self.assertIn("this host speaks 2 and 3 (it supports protocol 1)", host.stderr())
        with Host(DOUBLE, welcome={"protocol": 2}) as host:
            host.hello()
            self.assertEqual(host.exit_code(), 4)
            self.assertIn("welcome: protocol 2", host.stderr())

    def test_invalid_welcome_exits_with_4(self) -> None:
        cases: List[Dict[str, Any]] = [
            {"options": []},
            {"max_frame": -1},
            {"max_frame": 1.5},
            {"slots": 0},
            {"slots": 1025},
            {"max_size": 1 << 31},
            {"devices": [0]},
        ]
        for changes in cases:
            with self.subTest(changes), Host(DOUBLE, welcome=changes) as host:
                host.hello()
                self.assertEqual(host.exit_code(), 4)

    def test_error_in_setup_is_reported(self) -> None:
        source = (
            DOUBLE
            + """
class Fails(Double):
    def setup(self, ctx):
        open("/no/such/model")
"""
        )
        with Host(source) as host:
            host.hello()
            state, _ = host.expect("state")
            self.assertEqual(state["state"], "ERROR")
            self.assertIn("/no/such/model", state["message"])
            error, _ = host.expect("error")
            self.assertEqual(
                (error["kind"], error["error"], "batch" in error), ("exception", "FileNotFoundError", False)
            )
            self.assertIn("in setup", error["traceback"])
            self.assertRegex(error["traceback"], r'worker_file.py", line \d+, in setup\n(.*\n)+FileNotFoundError: .*$')
            self.assertEqual(host.exit_code(), 1)
            self.assertEqual(host.stderr(), "")  # the host logs the traceback

    def test_file_that_cannot_be_loaded_is_reported(self) -> None:
        for source, message, trace in (
            ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", "worker_file.py"),
            ("def predict(self, batch)", "SyntaxError: ", "def predict(self, batch)"),
            ("x = 1", "there is no subclass of stagemesh.Worker", ""),
        ):
            with self.subTest(message), Host(source) as host:
                host.hello()
                self.assertIn(message, host.expect("state")[0]["message"])
                error, _ = host.expect("error")
                self.assertIn(trace, error.get("traceback", ""))
                self.assertEqual("traceback" in error, bool(trace))
                self.assertNotIn("lifecycle.py", error.get("traceback", ""))
                self.assertEqual(host.exit_code(), 1)
                self.assertEqual(host.stderr(), "")

    def test_native_crash_prints_a_traceback(self) -> None:
        source = DOUBLE + "\n    def setup(self, ctx):\n        import ctypes\n        ctypes.string_at(0)\n"
        with Host(source) as host:
            host.hello()
            self.assertEqual(host.exit_code(), -signal.SIGSEGV)
            self.assertRegex(host.stderr(), r'worker_file.py", line \d+ in setup')

    def test_invalid_declaration_has_no_traceback(self) -> None:
        source = DOUBLE.replace('outputs = {"y": Tensor("FP32", [-1, 2])}', 'outputs = {"y": Tensor("FP32", [2])}')
        with Host(source) as host:
            host.hello()
            self.assertIn("axis 0 is rows", host.expect("state")[0]["message"])
            self.assertNotIn("traceback", host.expect("error")[0])
            self.assertEqual(host.exit_code(), 1)
            self.assertEqual(host.stderr(), "")

    def test_exit_in_setup_exits_with_1(self) -> None:
        with Host(DOUBLE + "\nclass Exits(Double):\n    def setup(self, ctx):\n        sys.exit(0)\n") as host:
            host.hello()
            self.assertEqual(host.exit_code(), 1)

    def test_start_by_hand_explains_the_mistake(self) -> None:
        for source, arguments, environ, code, want in (
            (DOUBLE, (), {}, 2, "STAGEMESH_SOCKET is not set"),
            (DOUBLE, (), {"STAGEMESH_SOCKET": "/no/socket"}, 3, "/no/socket"),
            (DOUBLE, (), {"STAGEMESH_LIFELINE": "999"}, 2, "STAGEMESH_LIFELINE is '999', which is not an open pipe"),
            (DOUBLE, (), {"STAGEMESH_LIFELINE": "0"}, 2, "is '0', which is not an open pipe: it is not a pipe"),
            ("x = 1", (), {}, 2, "there is no subclass of stagemesh.Worker"),
            (DOUBLE + "\nclass B(Worker): pass\n", (), {}, 2, "several workers (Double, B); name one"),
            ("", (f"{keyword.__file__}:Q",), {}, 2, f"{keyword.__file__}: there is no Q"),
            ("", ("/no/file.py",), {}, 2, "/no/file.py: No such file"),
            (DOUBLE.replace("def predict", "def forward"), (), {}, 1, "neither predict(self, batch) nor predict_item"),
        ):
            with self.subTest(want):
                done = start(source, *arguments, **environ)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(want, done.stderr)
                self.assertNotIn("Traceback", done.stderr)

    def test_tracebacks_begin_in_the_workers_file(self) -> None:
        for source, code, want in (
            ("import no_such_module", 1, "No module named 'no_such_module'"),
            ("def predict(self, batch)", 1, "SyntaxError"),
        ):
            with self.subTest(want):
                done = start(source)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(want, done.stderr)
                self.assertIn("w.py", done.stderr)
                self.assertNotIn("lifecycle.py", done.stderr)

    def test_missing_numpy_is_reported(self) -> None:
        source = DOUBLE.replace('arrays = "buffer"', 'arrays = "numpy"') + "\nsys.modules['numpy'] = None\n"
        with Host(source) as host:
            host.hello()
            self.assertIn("install numpy", host.expect("state")[0]["message"])
            self.assertEqual(host.exit_code(), 1)


if __name__ == "__main__":
    unittest.main()

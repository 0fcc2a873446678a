"""A worker as a process: starting, signals, the lifeline, violations, exit codes."""

from __future__ import annotations

import keyword
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from typing import Any, Dict, List, Tuple

from .support import DOUBLE, ROOT, Host, alive, eventually, floats, frame


class ConversationTest(unittest.TestCase):
    def test_hello_ready_predict_ping_shutdown(self) -> None:
        with Host(DOUBLE) as host:
            hello = host.hello()
            self.assertEqual((hello["protocols"], hello["name"], hello["pid"]), ([1], "Double", host.process.pid))
            self.assertRegex(hello["sdk"], r"^stagemesh-python \d")
            ready, _ = host.expect("ready")
            self.assertEqual(ready["slots"], 1)
            self.assertEqual(ready["spec"]["inputs"], [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}])
            for batch in range(1, 4):
                host.predict(batch, rows=3, value=4, timeout=1000, unknown="ignored")
                header, body = host.expect("result")
                self.assertEqual((header["batch"], body), (batch, floats(*[8] * 6)))
                part = header["parts"][0]
                self.assertEqual((part["name"], part["shape"], part["at"], part["size"]), ("y", [3, 2], 0, 24))
            host.send({"type": "ping", "n": 9, "unknown": {}})
            self.assertEqual(host.expect("pong")[0]["n"], 9)
            for kind in ("load", "unload"):
                host.send({"type": kind, "model": {}})
                self.assertEqual(host.expect("error")[0]["kind"], "unsupported")
            host.send({"type": "shutdown", "timeout": 5000})
            self.assertEqual(host.expect("state")[0]["state"], "SHUTDOWN")
            self.assertTrue(host.ended())
            self.assertEqual(host.exit_code(), 0)
            self.assertEqual(host.stderr(), "")

    def test_items_sent_one_by_one_are_joined(self) -> None:
        with Host(DOUBLE) as host:
            host.ready()
            body = floats(1, 2) + bytes(56) + floats(3, 4, 5, 6)
            part = {"name": "x", "datatype": "FP32"}
            parts = [
                {**part, "shape": [2, 2], "item": 1, "at": 64, "size": 16},
                {**part, "shape": [1, 2], "item": 0, "at": 0, "size": 8},
            ]
            host.send(
                {"type": "predict", "batch": 1, "items": [{"id": "a"}, {"id": "b", "rows": 2}], "parts": parts}, body
            )
            header, got = host.expect("result")
            self.assertEqual((header["parts"][0]["shape"], got), ([3, 2], floats(2, 4, 6, 8, 10, 12)))

    def test_large_bodies_do_not_stay_in_memory(self) -> None:
        source = """
            from stagemesh import Tensor, Worker
            class Same(Worker):
                arrays = "buffer"
                inputs = {"x": Tensor("UINT8", [-1, -1])}
                outputs = {"y": Tensor("UINT8", [-1, -1])}
                def predict(self, batch):
                    return {"y": batch["x"]}
        """
        with Host(source) as host:
            host.ready()
            for batch, size in enumerate((1 << 20, 50 << 20, 100)):
                data = os.urandom(100) * (size // 100 + 1)
                data = data[:size]
                part = {"name": "x", "datatype": "UINT8", "shape": [1, size], "at": 0, "size": size}
                host.send({"type": "predict", "batch": batch, "items": [{"id": "a"}], "parts": [part]}, data)
                _, body = host.expect("result")
                self.assertTrue(body == data, f"{size} bytes came back otherwise")
            with open(f"/proc/{host.process.pid}/status") as file:
                now = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
            self.assertLess(now, 60 << 10, "KiB stay in memory after a body of 50 MB")

    def test_host_may_write_byte_by_byte(self) -> None:
        with Host(DOUBLE) as host:
            host.ready()
            body = floats(1, 2)
            part = {"name": "x", "datatype": "FP32", "shape": [1, 2], "at": 0, "size": 8}
            data = frame({"type": "predict", "batch": 1, "items": [{"id": "a"}], "parts": [part]}, body)
            for at in range(len(data)):
                host.sock.sendall(data[at : at + 1])
            self.assertEqual(host.expect("result")[1], floats(2, 4))

    def test_printed_lines_reach_standard_output(self) -> None:
        source = (
            DOUBLE
            + """
class Loud(Double):
    def predict(self, batch):
        print("SMW1 in predict", "\\ud800")
        os.write(1, b"raw\\n")
        return super().predict(batch)
"""
        )
        with Host(source) as host:
            host.ready()
            host.predict(1)
            host.expect("result")
            assert host.process.stdout is not None
            self.assertEqual(host.process.stdout.readline(), b"SMW1 in predict \\ud800\n")
            self.assertEqual(host.process.stdout.readline(), b"raw\n")

    def test_file_may_serve_itself(self) -> None:
        source = (
            DOUBLE.replace('arrays = "buffer"', 'arrays = "numpy"')
            + '\nfrom stagemesh import serve\nserve(Double, arrays="buffer")\n'
        )
        for module in (True, False):
            with self.subTest(module=module):
                command = [sys.executable] + (["-m", "stagemesh"] if module else [])
                host = Host.__new__(Host)
                # The file's path is known only inside, so the command is a shell's.
                Host.__init__(
                    host,
                    source,
                    command=["sh", "-c", f"exec {' '.join(command)} $(dirname $STAGEMESH_SOCKET)/worker_file.py"],
                )
                with host:
                    host.ready()
                    host.predict(1)
                    host.expect("result")
                    host.send({"type": "shutdown", "timeout": 5000})
                    self.assertEqual(host.exit_code(), 0)


class CancelTest(unittest.TestCase):
    SOURCE = (
        DOUBLE
        + """
class Slow(Double):
    def predict(self, batch):
        note("entered", batch.id)
        if batch.id == 1:
            while not batch.items[1].cancelled:
                time.sleep(0.001)
            note("seen", [item.cancelled for item in batch.items] + [batch.cancelled])
        if batch.id == 2:
            while not batch.cancelled:
                time.sleep(0.001)
        if batch.id == 3:
            wait_for("go")
        return super().predict(batch)
"""
    )

    def test_cancel_is_seen_during_predict(self) -> None:
        with Host(self.SOURCE) as host:
            host.ready()
            host.predict(1, rows=3)
            eventually(lambda: host.lines(host.path("entered")) == ["1"], "the batch runs")
            host.send({"type": "cancel", "batch": 7})  # of a batch that is long over
            host.send({"type": "cancel", "batch": 1, "items": [1, 99]})
            host.expect("result")
            self.assertEqual(host.lines(host.path("seen")), ["[False, True, False, False]"])
            host.predict(2)
            host.send({"type": "cancel", "batch": 2})
            self.assertEqual(host.expect("result")[0]["batch"], 2)
            host.send({"type": "cancel", "batch": 2})  # too late
            host.send({"type": "ping", "n": 1})
            host.expect("pong")

    def test_threads_may_read_cancels_at_once(self) -> None:
        source = (
            DOUBLE
            + """
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
class Asks(Double):
    def setup(self, ctx):
        sys.setswitchinterval(1e-6)
    def predict(self, batch):
        def ask(item):
            while not item.cancelled:
                pass
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, batch.items))
        note("seen", batch.id)
        def ask_on():
            for _ in range(20000):
                batch.cancelled
        Thread(target=ask_on, daemon=True).start()  # beyond the batch's end
        return super().predict(batch)
"""
        )
        with Host(source) as host:
            host.ready()
            for batch in range(10):
                host.predict(batch, rows=8)
                for i in range(30):
                    host.send({"type": "cancel", "batch": batch, "items": [i % 6, 0, 1]})
                host.send({"type": "cancel", "batch": batch})
                self.assertEqual(host.expect("result")[0]["batch"], batch)
            self.assertEqual(len(host.lines(host.path("seen"))), 10)

    def test_cancelled_single_items_do_not_start(self) -> None:
        source = (
            DOUBLE
            + """
class One(Worker):
    arrays = "buffer"
    inputs = outputs = {"x": Tensor("FP32", [-1, 2])}
    def predict_item(self, item):
        note("entered", item.id)
        wait_for("go")
        return {"x": item["x"]}
"""
        )
        with Host(
            source,
            command=["sh", "-c", f"exec {sys.executable} -m stagemesh $(dirname $STAGEMESH_SOCKET)/worker_file.py:One"],
        ) as host:
            host.ready()
            host.predict(1, rows=3)
            eventually(lambda: host.lines(host.path("entered")) == ["r1-0"], "the first item runs")
            host.send({"type": "cancel", "batch": 1, "items": [1]})
            open(host.path("go"), "w").close()
            header, _ = host.expect("result")
            self.assertEqual([f["item"] for f in header["faults"]], [1])
            self.assertEqual(host.lines(host.path("entered")), ["r1-0", "r1-2"])

    def test_frames_during_a_batch_are_kept(self) -> None:
        with Host(self.SOURCE) as host:
            host.ready()
            host.predict(3)
            eventually(lambda: host.lines(host.path("entered")) == ["3"], "the batch runs")
            host.send({"type": "ping", "n": 5})
            host.send({"type": "shutdown", "timeout": 5000})
            open(host.path("go"), "w").close()
            self.assertEqual(host.receive()[0]["type"], "result")
            self.assertEqual(host.receive()[0]["type"], "pong")
            self.assertEqual(host.receive()[0]["state"], "SHUTDOWN")
            self.assertEqual(host.exit_code(), 0)

    def test_lost_connection_cancels_the_batch(self) -> None:
        with Host(self.SOURCE) as host:
            host.ready()
            host.predict(2)
            eventually(lambda: host.lines(host.path("entered")) == ["2"], "the batch runs")
            host.sock.close()
            self.assertEqual(host.exit_code(), 3)
            self.assertIn("the connection to the host ended", host.stderr())


class SignalsTest(unittest.TestCase):
    SLOW = (
        DOUBLE
        + """
class Slow(Double):
    def predict(self, batch):
        note("entered", batch.id)
        wait_for("go")
        return super().predict(batch)
    def teardown(self):
        note("teardown")
"""
    )

    def test_signal_while_idle_exits_with_0(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(number), Host(DOUBLE) as host:
                host.ready()
                host.send({"type": "ping", "n": 1})
                host.expect("pong")
                os.kill(host.process.pid, number)
                self.assertEqual(host.expect("state")[0]["state"], "SHUTDOWN")
                self.assertTrue(host.ended())
                self.assertEqual(host.exit_code(), 0)

    def test_signals_during_a_batch_let_it_finish(self) -> None:
        with Host(self.SLOW) as host:
            host.ready()
            host.predict(1, rows=2)
            eventually(lambda: host.lines(host.path("entered")) == ["1"], "the batch runs")
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                os.kill(host.process.pid, number)
            open(host.path("go"), "w").close()
            self.assertEqual(host.expect("state")[0]["state"], "SHUTDOWN")
            self.assertEqual(host.expect("result")[1], floats(2, 2, 2, 2))
            self.assertTrue(host.ended())
            self.assertEqual(host.exit_code(), 0)
            self.assertEqual(len(host.lines(host.path("teardown"))), 1)

    def test_received_batch_runs_despite_an_earlier_signal(self) -> None:
        with Host(self.SLOW) as host:
            host.ready()
            os.kill(host.process.pid, signal.SIGSTOP)
            host.predict(1)
            os.kill(host.process.pid, signal.SIGTERM)
            os.kill(host.process.pid, signal.SIGCONT)
            open(host.path("go"), "w").close()
            kinds = [host.receive()[0]["type"], host.receive()[0]["type"]]
            self.assertEqual(sorted(kinds), ["result", "state"])
            self.assertEqual(host.exit_code(), 0)

    def test_signal_under_load_exits_with_0(self) -> None:
        for i in range(10):
            with Host(DOUBLE) as host:
                host.ready()
                answered = 0
                end = time.monotonic() + 0.002 * i
                while time.monotonic() < end:
                    host.predict(answered)
                    host.expect("result")
                    answered += 1
                os.kill(host.process.pid, signal.SIGTERM)
                self.assertEqual(host.expect("state")[0]["state"], "SHUTDOWN")
                self.assertEqual(host.exit_code(10), 0)

    def test_signal_ends_setup_at_once(self) -> None:
        source = (
            DOUBLE
            + """
class Loads(Double):
    def setup(self, ctx):
        ctx.progress("loading")
        time.sleep(600)
"""
        )
        with Host(source) as host:
            host.hello()
            self.assertEqual(host.expect("state")[0], {"type": "state", "state": "STARTUP", "message": "loading"})
            os.kill(host.process.pid, signal.SIGTERM)
            self.assertEqual(host.expect("state")[0]["state"], "SHUTDOWN")
            self.assertEqual(host.exit_code(), 0)

    def test_signal_lets_all_slots_finish(self) -> None:
        source = self.SLOW + "\nSlow.concurrency = 2\n"
        with Host(source, welcome={"slots": 2}) as host:
            self.assertEqual(host.ready()["slots"], 2)
            host.predict(1)
            host.predict(2)
            eventually(lambda: len(host.lines(host.path("entered"))) == 2, "both run")
            os.kill(host.process.pid, signal.SIGTERM)
            self.assertEqual(host.expect("state")[0]["state"], "SHUTDOWN")
            open(host.path("go"), "w").close()
            self.assertEqual({host.expect("result")[0]["batch"] for _ in range(2)}, {1, 2})
            self.assertEqual(host.exit_code(), 0)

    def shut_down_after(self, setup: str, teardown: str = "pass") -> Tuple[int, str]:
        """Returns exit code and standard error of a worker that is shut down once it is ready."""
        source = f"""{DOUBLE}
import multiprocessing, threading
class Stays(Double):
    def setup(self, ctx):
        {setup}
    def teardown(self):
        {teardown}
"""
        with Host(source) as host:
            host.ready()
            host.send({"type": "shutdown", "timeout": 5000})
            return host.exit_code(5), host.stderr()

    THREAD = 'threading.Thread(target=time.sleep, args=(600,), name="stays").start()'
    CHILD = 'multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()'

    def test_running_threads_do_not_keep_the_process(self) -> None:
        code, errors = self.shut_down_after(self.THREAD)
        self.assertEqual(code, 0)
        self.assertIn("without waiting for the threads stays", errors)

    def test_running_children_do_not_keep_the_process(self) -> None:
        code, errors = self.shut_down_after(self.CHILD)
        self.assertEqual(code, 0)
        self.assertIn("without waiting for what runs at its exit, such as the children", errors)

    def test_exit_in_teardown_ends_despite_threads(self) -> None:
        self.assertIn(self.shut_down_after(self.THREAD, teardown="sys.exit(3)")[0], (1, 3))

    def test_signal_before_hello_exits_with_0(self) -> None:
        source = (
            DOUBLE
            + """
from stagemesh import life
connected = life.Life.connected
def then_a_signal(self, sock):
    connected(self, sock)
    os.kill(os.getpid(), signal.SIGTERM)
life.Life.connected = then_a_signal
"""
        )
        with Host(source) as host:
            self.assertEqual(host.exit_code(), 0)
            self.assertEqual(host.stderr(), "")

    def test_teardown_waits_for_running_batches(self) -> None:
        source = (
            self.SLOW.replace('"go")\n', '"go")\n        time.sleep(0.2)\n        note("order", "batch")\n')
            + '\n    def teardown(self):\n        note("order", "teardown")\nSlow.concurrency = 2\n'
        )
        with Host(source, welcome={"slots": 2}) as host:
            host.ready()
            host.predict(1)
            eventually(lambda: host.lines(host.path("entered")) == ["1"], "the batch runs")
            os.kill(host.process.pid, signal.SIGSTOP)
            os.kill(host.process.pid, signal.SIGTERM)
            host.sock.close()
            os.kill(host.process.pid, signal.SIGCONT)
            open(host.path("go"), "w").close()
            self.assertEqual(host.exit_code(), 0)
            self.assertEqual(host.lines(host.path("order")), ["batch", "teardown"])

    def test_error_in_teardown_exits_with_1(self) -> None:
        with Host(DOUBLE + '\n    def teardown(self):\n        raise KeyError("left")\n') as host:
            host.ready()
            host.send({"type": "shutdown", "timeout": 5000})
            self.assertEqual(host.exit_code(), 1)
            self.assertRegex(host.stderr(), r'worker_file.py", line \d+, in teardown\n(.*\n)+KeyError: .left.')


class LifelineTest(unittest.TestCase):
    BUSY = (
        DOUBLE
        + """
import ctypes
class Busy(Double):
    def predict(self, batch):
        if batch.id == 1:
            child = subprocess.Popen(["sleep", "600"])
            note("child", child.pid)
            time.sleep(600)
        note("child", os.getpid())
        ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
"""
    )

    def ends(self, host: Host) -> None:
        started = time.monotonic()
        os.close(host.lifeline)
        host.lifeline = -1
        code = host.exit_code(5)
        self.assertLess(time.monotonic() - started, 2)
        self.assertNotEqual(code, 0)

    def test_idle_worker_ends_with_the_lifeline(self) -> None:
        with Host(DOUBLE) as host:
            host.ready()
            self.ends(host)

    def test_busy_worker_ends_with_its_children(self) -> None:
        with Host(self.BUSY) as host:
            host.ready()
            host.predict(1)
            eventually(lambda: len(host.lines(host.path("child"))) == 1, "the child runs")
            child = int(host.lines(host.path("child"))[0])
            self.assertTrue(alive(child))
            started = time.monotonic()
            self.ends(host)
            eventually(lambda: not alive(child), "the child ends too", 2 - (time.monotonic() - started))

    @unittest.skipUnless(sys.platform.startswith("linux"), "elsewhere the thread alone watches, which needs the lock")
    def test_worker_holding_the_lock_ends(self) -> None:
        with Host(self.BUSY) as host:
            host.ready()
            host.predict(2)
            eventually(lambda: len(host.lines(host.path("child"))) == 1, "the batch runs")
            self.ends(host)

    def test_worker_in_setup_ends_with_the_lifeline(self) -> None:
        source = (
            DOUBLE
            + """
class Loads(Double):
    def setup(self, ctx):
        ctx.progress("loading")
        time.sleep(600)
"""
        )
        with Host(source) as host:
            host.hello()
            host.expect("state")
            self.ends(host)


class ForksTest(unittest.TestCase):
    SOURCE = (
        DOUBLE
        + """
class Forks(Double):
    def setup(self, ctx):
        pid = os.fork()
        if pid == 0:
            note("child", f"{os.getpid()} {signal.getsignal(signal.SIGTERM) == signal.SIG_DFL}")
            time.sleep(600)
            os._exit(0)
"""
    )

    def test_forked_child_is_independent_of_the_host(self) -> None:
        with Host(self.SOURCE) as host:
            host.ready()
            eventually(lambda: len(host.lines(host.path("child"))) == 1, "the child runs")
            pid, default = host.lines(host.path("child"))[0].split()
            self.assertEqual(default, "True")
            os.kill(host.process.pid, signal.SIGKILL)
            self.assertTrue(host.ended(), "the child holds the connection")
            self.assertTrue(alive(int(pid)))
            os.kill(int(pid), signal.SIGTERM)
            eventually(lambda: not alive(int(pid)), "a signal ends the child")

    def test_forked_child_keeps_its_exit_code(self) -> None:
        source = (
            DOUBLE
            + """
class Forks(Double):
    def predict(self, batch):
        pids = [os.fork()]
        if pids[0] == 0:
            sys.exit(0)
        pids.append(os.fork())
        if pids[1] == 0:
            raise KeyError("of the child")
        note("codes", [os.WEXITSTATUS(os.waitpid(pid, 0)[1]) for pid in pids])
        return super().predict(batch)
"""
        )
        with Host(source) as host:
            host.ready()
            host.predict(1)
            self.assertEqual(host.expect("result")[1], floats(2, 2))
            self.assertEqual(host.lines(host.path("codes")), ["[0, 1]"])
            self.assertIn("of the child", host.stderr())

    def test_multiprocessing_children_do_not_serve(self) -> None:
        for how in ("spawn", "forkserver"):
            source = (
                DOUBLE.replace('arrays = "buffer"', 'arrays = "numpy"')
                + f"""
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from stagemesh import serve

def double(row):
    return [2 * v for v in row]

class Spawns(Double):
    def predict(self, batch):
        with ProcessPoolExecutor(1, multiprocessing.get_context("{how}")) as pool:
            return {{"y": list(pool.map(double, batch["x"].tolist()))}}

serve(Spawns, arrays="buffer")
"""
            )
            command = ["sh", "-c", f"exec {sys.executable} $(dirname $STAGEMESH_SOCKET)/worker_file.py"]
            with self.subTest(how), Host(source, command=command) as host:
                host.ready()
                host.predict(1, value=2)
                self.assertEqual(host.expect("result")[1], floats(4, 4))
                host.send({"type": "shutdown", "timeout": 5000})
                self.assertEqual(host.exit_code(), 0)


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
            ("an item without an id", predict(items=[{}]), "items[0]: an object with an id"),
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
            ("an unknown datatype", predict(parts=[{**part, "datatype": "FP8"}]), "datatype 'FP8' is none"),
            ("a negative extent", predict(parts=[{**part, "shape": [-1, 2]}]), "an extent that is none"),
            ("an item that is none", predict(parts=[{**part, "item": 1}]), "item 1 is none of the 1"),
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
            self.assertEqual(host.exit_code(), 1)

            # What a host shows as the last that the worker wrote.
            self.assertRegex(host.stderr(), r'worker_file.py", line \d+, in setup\n(.*\n)+FileNotFoundError: .*\n$')

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
            self.assertEqual(len(host.stderr().splitlines()), 1)

    def test_exit_in_setup_exits_with_1(self) -> None:
        with Host(DOUBLE + "\nclass Exits(Double):\n    def setup(self, ctx):\n        sys.exit(0)\n") as host:
            host.hello()
            self.assertEqual(host.exit_code(), 1)

    def test_start_by_hand_explains_the_mistake(self) -> None:
        for source, arguments, environ, code, want in (
            (DOUBLE, (), {}, 2, "STAGEMESH_SOCKET is not set"),
            (DOUBLE, (), {"STAGEMESH_SOCKET": "/no/socket"}, 3, "/no/socket"),
            (DOUBLE, (), {"STAGEMESH_LIFELINE": "999"}, 2, "STAGEMESH_LIFELINE is '999', which is no open pipe"),
            (DOUBLE, (), {"STAGEMESH_LIFELINE": "0"}, 2, "LIFELINE is '0', which is no open pipe: it is no pipe"),
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
                self.assertNotIn("serving.py", done.stderr)

    def test_missing_numpy_is_reported(self) -> None:
        source = DOUBLE.replace('arrays = "buffer"', 'arrays = "numpy"') + "\nsys.modules['numpy'] = None\n"
        with Host(source) as host:
            host.hello()
            self.assertIn("install numpy", host.expect("state")[0]["message"])
            self.assertEqual(host.exit_code(), 1)


if __name__ == "__main__":
    unittest.main()

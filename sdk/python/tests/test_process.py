"""A worker as a process: messages, cancels, signals, the lifeline, forks."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import unittest
from typing import Tuple

from .support import DOUBLE, Host, alive, eventually, floats, frame


class ConversationTest(unittest.TestCase):
    def test_hello_ready_predict_ping_shutdown(self) -> None:
        with Host(DOUBLE) as host:
            hello = host.hello()
            self.assertEqual((hello["protocols"], hello["name"], hello["pid"]), ([1], "Double", host.process.pid))
            self.assertRegex(hello["sdk"], r"^stagemesh-python \d")
            ready, _ = host.expect("ready")
            self.assertEqual((ready["slots"], "engine" in ready), (1, False))
            self.assertEqual(ready["spec"]["inputs"], [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}])
            for batch in range(1, 4):
                host.predict(batch, rows=3, value=4, timeout=1000, unknown="ignored")
                header, body = host.expect("result")
                self.assertEqual((header["batch"], body), (batch, floats(*[8] * 6)))
                part = header["parts"][0]
                self.assertEqual((part["name"], part["shape"], part["at"], part["size"]), ("y", [3, 2], 0, 24))
            host.send({"type": "ping", "n": 9, "unknown": {}})
            self.assertEqual(host.expect("pong")[0]["n"], 9)
            for kind in ("load", "unload", "size"):
                host.send({"type": kind, "load": 1, "model": "m"})
                self.assertEqual(host.expect("error")[0]["kind"], "unsupported")
            host.send({"type": "shutdown", "timeout": 5000})
            self.assertEqual(host.expect("state")[0]["state"], "SHUTDOWN")
            self.assertTrue(host.ended())
            self.assertEqual(host.exit_code(), 0)
            self.assertEqual(host.stderr(), "")

    def test_ready_names_the_engine(self) -> None:
        with Host(DOUBLE + '    engine_name = "abacus 1.0, CPU"\n') as host:
            host.hello()
            self.assertEqual(host.expect("ready")[0]["engine"], "abacus 1.0, CPU")

    def test_engine_of_an_author_is_not_sent(self) -> None:
        with Host(DOUBLE + "    engine = object()\n") as host:
            host.hello()
            self.assertNotIn("engine", host.expect("ready")[0])

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

    def test_breakpoint_says_where_it_works(self) -> None:
        source = """
            from stagemesh import Tensor, Worker
            class Stops(Worker):
                arrays = "buffer"
                inputs = {"x": Tensor("FP32", [-1, 2])}
                outputs = {"y": Tensor("FP32", [-1, 2])}
                def predict(self, batch):
                    breakpoint()
                    return {"y": batch["x"]}
        """
        with Host(source) as host:
            host.ready()
            host.predict(1, rows=1, value=4)
            header, _ = host.expect("error")
            self.assertEqual(header["error"], "RuntimeError")
            self.assertIn("testing.run(process=False)", header["message"])
            self.assertIn("in predict\n", header["traceback"])

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

    def test_prefetched_batch_runs_next(self) -> None:
        for asked in ({"type": "ping", "n": 5}, {"type": "shutdown", "timeout": 5000}):
            with self.subTest(asked), Host(self.SOURCE) as host:
                self.assertEqual(host.hello()["capabilities"], ["prefetch"])
                host.expect("ready")
                host.predict(1, rows=3)  # reads cancels while it runs, and so the next batch
                host.predict(4)
                host.send(asked)
                host.send({"type": "cancel", "batch": 1, "items": [1]})
                first = host.receive()[0]  # the answer to the message, which came before the results
                self.assertIn(first["type"], ("pong", "state"))
                self.assertEqual([host.expect("result")[0]["batch"] for _ in range(2)], [1, 4])
                self.assertEqual(host.lines(host.path("entered")), ["1", "4"])

    def test_second_prefetched_batch_is_a_violation(self) -> None:
        with Host(self.SOURCE) as host:
            host.ready()
            for batch in (1, 4, 5):
                host.predict(batch, rows=3)
            self.assertIn("beyond the slots", host.expect("error")[0]["message"])
            self.assertEqual(host.exit_code(), 4)

    def test_batches_without_inputs_may_differ_in_rows(self) -> None:
        source = """
from array import array
from stagemesh import Tensor, Worker
class Counts(Worker):
    arrays = "buffer"
    inputs = {"x": Tensor("FP32", [-1], optional=True)}
    outputs = {"y": Tensor("FP32", [-1])}
    def predict(self, batch):
        return {"y": memoryview(array("f", [0.0] * batch.rows))}
"""
        with Host(source) as host:
            host.ready()
            for items in (1, 3, 2):
                named = [{"id": f"r{i}"} for i in range(items)]
                host.send({"type": "predict", "batch": items, "items": named, "parts": []})
                self.assertEqual(host.expect("result")[0]["parts"][0]["shape"], [items])

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

    def test_signal_at_the_end_changes_no_exit_code(self) -> None:
        source = (
            DOUBLE
            + """
import os, signal
class AtEnd:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
at_end = AtEnd()
"""
        )
        with Host(source) as host:
            host.ready()
            os.kill(host.process.pid, signal.SIGTERM)
            self.assertEqual(host.expect("state")[0]["state"], "SHUTDOWN")
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

    def test_batch_on_its_way_runs_despite_a_signal(self) -> None:
        part = {"name": "x", "datatype": "FP32", "shape": [1, 2], "at": 0, "size": 8}
        whole = frame({"type": "predict", "batch": 2, "items": [{"id": "a"}], "parts": [part]}, floats(1, 1))
        for cut in (10, 30, len(whole) - 1):
            with self.subTest(cut=cut), Host(self.SLOW) as host:
                host.ready()
                host.predict(1)
                eventually(lambda: host.lines(host.path("entered")) == ["1"], "the batch runs")
                host.sock.sendall(whole[:cut])
                os.kill(host.process.pid, signal.SIGTERM)
                open(host.path("go"), "w").close()
                self.assertEqual(host.expect("state")[0]["state"], "SHUTDOWN")
                self.assertEqual(host.expect("result")[0]["batch"], 1)
                host.sock.sendall(whole[cut:])
                self.assertEqual(host.expect("result")[0]["batch"], 2)
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
from stagemesh import lifecycle
connected = lifecycle.Life.connected
def then_a_signal(self, sock):
    connected(self, sock)
    os.kill(os.getpid(), signal.SIGTERM)
lifecycle.Life.connected = then_a_signal
"""
        )
        with Host(source) as host:
            self.assertEqual(host.exit_code(), 0)
            self.assertEqual(host.stderr(), "")

    def test_teardown_waits_for_running_batches(self) -> None:
        source = (
            self.SLOW.replace('"go")\n', '"go")\n        time.sleep(0.2)\n        note("order", "batch")\n')
            + """
    def teardown(self):
        note("order", "teardown")
Slow.concurrency = 2
from stagemesh import lifecycle
on_signal = lifecycle.Life._on_signal
def noted(self, number, frame):
    on_signal(self, number, frame)
    note("signal")
lifecycle.Life._on_signal = noted
"""
        )
        with Host(source, welcome={"slots": 2}) as host:
            host.ready()
            host.predict(1)
            eventually(lambda: host.lines(host.path("entered")) == ["1"], "the batch runs")
            host.sock.sendall(frame({"type": "ping", "n": 1})[:10])  # so that the worker still reads after the signal
            os.kill(host.process.pid, signal.SIGTERM)
            eventually(lambda: host.lines(host.path("signal")) != [], "the signal is handled")
            host.sock.close()
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


class ProcessStateTest(unittest.TestCase):
    """What a worker's module changes for its whole process leaves the library alone."""

    # Ends once the connection has been idle for longer than the timeouts.
    TAIL = """
import threading
class Later(Double):
    def setup(self, ctx):
        self.log = ctx.log
        threading.Timer(0.1, note, ["idle"]).start()
    def predict(self, batch):
        if batch["x"][0, 0] < 0:
            wait_for("go")
            raise KeyError("of the batch")
        self.log.error("logged in predict")
        return super().predict(batch)
"""

    def test_state_set_before_serve_does_not_break_the_worker(self) -> None:
        for statement, logs in (
            ("import socket; socket.setdefaulttimeout(0.05)", True),
            ("import socket; socket.setdefaulttimeout(0)", True),
            ("sys.stderr = None", True),
            ("sys.stdout = sys.stderr = None; os.chdir('/')", True),
            ("sys.stderr.close()", True),
            ("import io; sys.stderr = io.StringIO()", False),
            ("signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGPIPE, signal.SIG_DFL)", True),
            ("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})", True),
            ("import tempfile; f = tempfile.mkdtemp(); os.chdir(f); os.rmdir(f)", True),
            ("sys.setrecursionlimit(60)", True),
            ("os.environ.clear()", True),
            ("import multiprocessing; multiprocessing.set_start_method('spawn')", True),
            ("import faulthandler; faulthandler.enable(open('/dev/null', 'w')); sys.stderr = None", True),
            ("import logging.config; logging.config.dictConfig({'version': 1})", True),
            ("import logging; logging.disable()", False),
            ("import warnings; warnings.simplefilter('error')", True),
        ):
            with self.subTest(statement), Host(DOUBLE + self.TAIL + statement + "\n") as host:
                host.ready()
                eventually(lambda h=host: h.lines(h.path("idle")) != [], "the worker was idle")  # type: ignore[misc]
                host.predict(1, value=2)
                self.assertEqual(host.expect("result")[1], floats(4, 4))
                host.predict(2, value=-1)
                with open(host.path("go"), "w"):
                    pass
                self.assertEqual(host.expect("error")[0]["error"], "KeyError")
                os.kill(host.process.pid, signal.SIGTERM)
                self.assertEqual(host.expect("state")[0]["state"], "SHUTDOWN")
                self.assertTrue(host.ended())
                self.assertEqual(host.exit_code(), 0, host.stderr())
                if logs:
                    self.assertIn("logged in predict", host.stderr())

    def test_host_that_is_gone_does_not_kill_the_worker_by_sigpipe(self) -> None:
        statement = "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        with Host(DOUBLE + self.TAIL + statement) as host:
            host.ready()
            host.predict(1, value=-1)
            host.sock.shutdown(socket.SHUT_RDWR)
            with open(host.path("go"), "w"):
                pass
            self.assertEqual(host.exit_code(), 3)

    def test_worker_without_tensors_needs_no_numpy(self) -> None:
        source = """
            import sys
            sys.modules["numpy"] = None
            from stagemesh import Text, Worker
            class Up(Worker):
                inputs = {"x": Text()}
                outputs = {"y": Text()}
                def predict_item(self, item):
                    return {"y": item["x"].upper()}
        """
        with Host(source) as host:
            host.ready()
            part = {"name": "x", "content_type": "text/plain", "item": 0, "at": 0, "size": 2}
            host.send({"type": "predict", "batch": 1, "items": [{"id": "a"}], "parts": [part]}, b"ab")
            self.assertEqual(host.expect("result")[1], b"AB")


if __name__ == "__main__":
    unittest.main()

"""Returns every text, after the action that its first word names.

What it runs, and which processes there are, is on record in options["folder"].
"""

import json
import os
import signal
import subprocess
import time

from stagemesh import Text, Worker, serve


class Obedient(Worker):
    inputs = {"text": Text()}
    outputs = {"text": Text()}
    examples = [{"text": "warm up"}]

    def setup(self, ctx):
        self.ctx = ctx
        self.pause = float(os.environ.get("PAUSE", "0"))
        time.sleep(ctx.options.get("load", 0))
        self.record = os.open(self.path("record"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if self.is_set("broken"):
            raise RuntimeError("the model is broken")
        self.write("start", [])
        if ctx.options.get("child"):
            self.write("start", [], subprocess.Popen(["sleep", "600"]).pid)
            self.write("daemon", [], subprocess.Popen(["sleep", "600"], start_new_session=True).pid)

    def predict(self, batch):
        texts = batch["text"]
        if batch.warmup:
            return {"text": texts}
        self.write("run", texts)
        fits = self.ctx.options.get("fits")
        if fits and (len(texts) > fits or "huge" in texts):
            raise MemoryError(f"{len(texts)} texts")
        if any(text.startswith("raise ") for text in texts):
            raise ValueError("one of them is poison")
        for i, (item, text) in enumerate(zip(batch.items, texts)):
            item.respond("worker", str(self.ctx.index))
            item.respond("pid", str(os.getpid()))
            verb, _, rest = text.partition(" ")
            do = getattr(self, "do_" + verb, None)
            if do is not None:
                do(batch, i, rest)
        time.sleep(self.pause)
        return {"text": texts}

    def do_die(self, batch, i, rest):
        if rest == "once" and not self.first("died"):
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def do_freeze(self, batch, i, rest):
        """Stops once, as SIGSTOP from outside does."""
        if self.first("frozen " + rest):
            os.kill(os.getpid(), signal.SIGSTOP)

    def do_wait(self, batch, i, rest):
        """Waits for a flag."""
        while not self.is_set(rest):
            time.sleep(0.001)

    def do_nap(self, batch, i, rest):
        time.sleep(float(rest))

    def do_hold(self, batch, i, rest):
        """Waits until the item is cancelled."""
        while not batch.items[i].cancelled:
            time.sleep(0.001)
        self.write("cancelled", [rest])

    def do_print(self, batch, i, rest):
        print(rest)

    def path(self, name):
        return os.path.join(self.ctx.options["folder"], name)

    def is_set(self, name):
        return os.path.exists(self.path(name))

    def first(self, name):
        try:
            os.close(os.open(self.path(name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def write(self, what, texts, pid=None):
        line = {"what": what, "worker": self.ctx.index, "pid": pid or os.getpid(), "texts": texts}
        os.write(self.record, (json.dumps(line) + "\n").encode())


serve(Obedient, arrays="buffer")

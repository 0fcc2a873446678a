"""The worker of models of a fleet. Each model adds its name to the texts."""

import os
import shutil
import time

from stagemesh import ModelLimits, Text, Worker, serve


class Models(Worker):
    """Keeps a file for each loaded model in the folder of its options, and its process ID.

    load and run are how long a load and a batch take, in seconds; a model may have its own load.
    broken is how loads fail: not at all if it is empty, with the process if it is "crash".
    """

    arrays = "buffer"
    concurrency = 2
    inputs = {"text": Text()}
    outputs = {"text": Text()}
    models = ModelLimits(load_slots=4)

    def setup(self, ctx):
        """Empties the folder."""
        self.options = ctx.options
        shutil.rmtree(self.path(), ignore_errors=True)
        os.mkdir(self.path(), 0o700)
        with open(self.path("pid"), "w", encoding="ascii") as file:
            file.write(str(os.getpid()))

    def path(self, *name):
        """Returns the path of a file in the folder."""
        return os.path.join(self.options["folder"], *name)

    def load(self, model):
        """Takes its time."""
        if self.options["broken"] == "crash":
            os._exit(1)
        if self.options["broken"]:
            raise RuntimeError(self.options["broken"])
        model.size = 1 << 20
        end = time.monotonic() + float(model.options.get("load", self.options["load"]))
        while time.monotonic() < end:
            if model.cancelled:
                raise RuntimeError("the load was cancelled")
            time.sleep(0.005)
        with open(self.path(model.id), "w", encoding="ascii"):
            return model.id

    def unload(self, model):
        """Removes the file."""
        os.remove(self.path(model.id))

    def predict(self, batch):
        """Adds the name of the model."""
        time.sleep(self.options["run"])
        return {"text": [f"{text} {batch.model}" for text in batch["text"]]}


if __name__ == "__main__":
    serve(Models)

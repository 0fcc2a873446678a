"""Sends the fifty images of ../digits to a mesh whose classifier is the worker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
READY = re.compile(r"is ready: (http://\S+)")


class MeshTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        program = os.path.join(folder.name, "stagemesh")
        subprocess.run(["go", "build", "-o", program, "./services/cmd/stagemesh"], cwd=HERE.parent.parent, check=True)
        # The workers use the Python that has numpy, and the SDK that the mesh provides.
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path}
        environment.pop("PYTHONPATH", None)
        addresses = [text for flag in ("--listen", "--ops", "--admin") for text in (flag, "127.0.0.1:0")]
        self.mesh = subprocess.Popen(
            [program, "up", "--config", str(HERE / "mesh.yaml"), *addresses, "--log-level", "warn"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(self.end)
        assert self.mesh.stdout is not None
        line = self.mesh.stdout.readline()
        ready = READY.search(line)
        assert ready is not None, line
        self.url = f"{ready[1]}/v1/pipelines/digits:infer"

    def end(self) -> None:
        self.mesh.send_signal(signal.SIGTERM)
        _, _ = self.mesh.communicate(timeout=30)
        self.assertEqual(self.mesh.returncode, 0)

    def test_all_images_are_classified(self) -> None:
        images = sorted((HERE.parent / "digits" / "images").glob("*.png"))
        self.assertEqual(len(images), 50)
        for image in images:
            request = urllib.request.Request(self.url, image.read_bytes(), {"Content-Type": "image/png"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                found = re.search(rb'"name":"labels".*?"data":\["(\d)"', answer.read())
            assert found is not None
            with self.subTest(image.name):
                self.assertEqual(found[1].decode(), image.stem.split("-")[1])


if __name__ == "__main__":
    unittest.main()

"""rapidocr in one process: a thread for each caller, and as many threads for each model as THREADS says."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rapidocr import RapidOCR

SETTINGS = {
    "Global.log_level": "critical",
    "Rec.rec_batch_num": 1,  # for the texts that the mesh reads
    "EngineConfig.onnxruntime.intra_op_num_threads": int(os.environ.get("THREADS", "1")),
}


def read(ocr, picture):
    """Returns the texts of a picture as JSON."""
    return json.dumps(ocr(bytes(picture)).txts or []).encode()


class Handler(BaseHTTPRequestHandler):
    """Answers pictures with their texts."""

    protocol_version = "HTTP/1.1"  # keeps connections
    ocr = None

    def do_POST(self):
        """Reads a picture."""
        answer = read(self.ocr, self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        """Logs no requests."""


class Server(ThreadingHTTPServer):
    """As many callers as there are at once connect at once."""

    request_queue_size = 128


if __name__ == "__main__":
    Handler.ocr = RapidOCR(params=SETTINGS)
    Server(("127.0.0.1", int(os.environ["PEER_PORT"])), Handler).serve_forever()

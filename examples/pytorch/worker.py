"""A template for a model in PyTorch: on the GPU if there is one, else on the CPU.

Write your module into ``build``, and its shapes into ``inputs`` and ``outputs``.

    stagemesh check worker.py --max-size 8
"""

import torch

from stagemesh import InvalidInput, Tensor, Worker, serve


def build(options):
    """Returns the module, on the CPU."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    if "weights" in options:
        module.load_state_dict(torch.load(options["weights"], map_location="cpu", weights_only=True))
    return module


class Model(Worker):
    """Runs the module on all rows of a batch."""

    inputs = {"x": Tensor("FP32", [-1, 64])}
    outputs = {"p": Tensor("FP32", [-1, 10])}
    examples = [{"x": [0.0] * 64}]

    def setup(self, ctx):
        """Loads the module to its device.

        The process sees only its own devices (CUDA_VISIBLE_DEVICES), so they are cuda:0
        and up; each rank of a gang uses one of them.
        """
        self.device = torch.device("cpu")
        if ctx.devices:
            if not torch.cuda.is_available():
                raise RuntimeError(
                    f"the stage gives devices {ctx.devices}, and torch sees none: is it a build with CUDA?"
                )
            self.device = torch.device("cuda", ctx.local_rank % torch.cuda.device_count())
        ctx.progress(f"loading to {self.device}")
        self.module = build(ctx.options).to(self.device).eval()
        ctx.log.info("torch %s on %s", torch.__version__, self.device)

    @torch.inference_mode()
    def predict(self, batch):
        """Runs the module; after a torch.OutOfMemoryError the host runs the halves of the batch."""
        x = torch.from_numpy(batch["x"]).to(self.device, non_blocking=True)
        finite = torch.isfinite(x).all(dim=1).cpu()
        for i, item in enumerate(batch.items):
            if not finite[item.slice].all():
                batch.fail(i, InvalidInput("x", "is not finite"))
        return {"p": self.module(x).softmax(dim=1).cpu().numpy()}


if __name__ == "__main__":
    serve(Model, arrays="numpy")

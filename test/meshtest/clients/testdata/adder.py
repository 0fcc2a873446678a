"""A model of MLServer as stagehost/runner/runnertest expects one: it adds a number to each row."""

import asyncio

from mlserver import MLModel
from mlserver.errors import InferenceError
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

BAD, HOLD = -1, -3


class Adder(MLModel):
    """Has its number from its settings; only an empty source loads."""

    async def load(self) -> bool:
        """Takes the number."""
        extra = self.settings.parameters.extra
        if extra["source"]:
            raise ValueError(f"this source is {extra['source']}")
        self.add = int(extra["add"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Adds it to the rows."""
        x = payload.inputs[0]
        rows = list(x.data)
        if BAD in rows:
            raise InferenceError("this row is bad")
        if HOLD in rows:
            await asyncio.Event().wait()  # until the call is cancelled
        output = ResponseOutput(name="y", datatype="INT64", shape=x.shape, data=[row + self.add for row in rows])
        return InferenceResponse(model_name=self.name, outputs=[output])

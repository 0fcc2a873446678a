"""How tensors look to a worker: numpy arrays, or memoryviews.

Which of the two is the worker's declaration alone. numpy is only imported where
it is declared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, List, Optional, Sequence, Tuple

from .parts import Raw
from .specs import Tensor

__all__ = ["Arrays", "Mismatch", "arrays_of"]


class Mismatch(ValueError):
    """A value is not what was declared; the message says what came and what was wanted."""


class Arrays(ABC):
    """Turns tensors into what a worker sees, and back."""

    name: str

    @abstractmethod
    def view(self, raw: Raw) -> Any:
        """Returns the tensor as an array over the same bytes."""

    # Takes of a value what all values share that encode to one datatype and shape,
    # and whether it is C-contiguous; raises AttributeError for what is no array.
    traits: Callable[[Any], Any]

    @abstractmethod
    def viewer(self, raw: Raw) -> Callable[[memoryview], Any]:
        """Returns the function that views a tensor in a body as it views this one in its own."""

    @abstractmethod
    def pad(self, raws: Sequence[Raw], spec: Tensor, stack: bool) -> Any:
        """Returns one array of all, filled up to the longest extents.

        They are joined on axis 0, or stacked on a new one.
        """

    @abstractmethod
    def encode(self, value: Any, spec: Optional[Tensor], shape: Optional[Tuple[int, ...]]) -> Raw:
        """Returns a value as a tensor of the spec's datatype.

        shape is the wanted one, -1 for any extent; it is not checked, and says how
        many axes a flat value has. Raises Mismatch.
        """


def padded_extents(raws: Sequence[Raw], spec: Tensor, stack: bool) -> List[int]:
    """Returns the extents of one padded tensor; without stack, without axis 0."""
    wanted = spec.shape if stack else spec.shape[1:]
    shapes = [raw.shape if stack else raw.shape[1:] for raw in raws]
    out = []
    for axis, want in enumerate(wanted):
        longest = max(shape[axis] for shape in shapes)
        out.append(-(-longest // spec.multiple) * spec.multiple if want == -1 else longest)
    return out


def arrays_of(name: str) -> Arrays:
    """Returns ``"numpy"`` or ``"buffer"``; raises ValueError for others and ImportError without numpy."""
    if name == "buffer":
        from .arrays_buffer import BufferArrays

        return BufferArrays()
    if name == "numpy":
        try:
            from .arrays_numpy import NumpyArrays
        except ImportError as error:
            raise ImportError(
                f'arrays="numpy" needs numpy, which this Python lacks ({error}): '
                'install numpy beside the worker, or say arrays="buffer" for memoryviews'
            ) from error
        return NumpyArrays()
    raise ValueError(f'arrays: {name!r}; use "numpy" or "buffer"')

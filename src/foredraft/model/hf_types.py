"""transformers' class of models for annotations: to import it takes seconds, for code that a native model does not run.

The class itself is imported where it is needed as one: with modelling code, which has imported it already.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel as PreTrainedModel
else:
    from torch.nn import Module as PreTrainedModel  # its base class, which checks of types in tests see

__all__ = ["PreTrainedModel"]

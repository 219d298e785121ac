"""Truncated sampling, for evaluations: which tokens may be sampled."""

from collections.abc import Callable
from typing import NamedTuple

from minirl.errors import refuse

MAX_TOP_K = 256


class Truncation(NamedTuple):
    """Which tokens may be sampled: the `top_k` likeliest; of these the smallest set with at least the share `top_p`
    of their probability.

    The kept tokens' probabilities are then divided by their sum. top_k 0: all tokens may be sampled. Nothing is trained
    on truncated samples: their logprobs are those of other distributions than training computes.
    """

    top_k: int = 0
    top_p: float = 1.0

    def checked(self, named: Callable[[str], str] = str) -> "Truncation":
        """Return self. Raises InputError naming a field out of its range, or one that needs top_k.

        named: how messages name a field.
        """
        for name, off in self._field_defaults.items():
            value = getattr(self, name)
            most = MAX_TOP_K if name == "top_k" else 1
            is_number = type(value) in (int, type(off))
            is_right = is_number and 0 <= value <= most
            refuse(not is_right, f"{named(name)} {value!r:.80}: must be a number from 0 to {most}")
            refuse(
                value != off and not self.top_k,
                f"{named(name)} {value}: needs {named('top_k')}, which bounds the tokens that are sorted; add "
                f"{named('top_k')} {MAX_TOP_K}, the most",
            )
        refuse(self.top_p == 0, f"{named('top_p')} {self.top_p}: must be greater than 0")
        return self


NO_TRUNCATION = Truncation()

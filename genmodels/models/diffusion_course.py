"""By which steps a diffusion model draws samples: its samplers, and what each does when nothing is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from genmodels.diffusion import SAMPLERS, SPACINGS
from genmodels.flows.boundary import one_of

SamplerName = Literal["ddpm", "ddim", "euler", "heun", "edm", "dpmpp_2m", "unipc"]


@dataclass(frozen=True)
class Usual:
    """What a sampler does when nothing is said: its steps (None for T), their spacing; and the option it alone has."""

    steps: int | None
    spacing: str
    option: str | None = None


USUAL: dict[str, Usual] = {
    "ddpm": Usual(None, "integer_trailing"),
    "ddim": Usual(50, "integer_trailing", "eta"),
    "euler": Usual(50, "uniform_log_snr"),
    "heun": Usual(18, "karras"),
    "edm": Usual(40, "karras", "churn"),
    "dpmpp_2m": Usual(20, "uniform_log_snr"),
    "unipc": Usual(20, "uniform_log_snr"),
}
_INPAINTING_STEPS = 50


class DiffusionCourse:
    """The way from noise to data, mixed into a model with `core.schedule`, `num_steps` and `variance`."""

    def course(
        self, name: str, steps: int | None = None, spacing: str | None = None, eta: float | None = None,
        churn: float | None = None, inpaints: bool = False,
    ) -> tuple[Tensor, object, dict]:
        """The decreasing times of a sampler, the sampler, and what to note of both.

        Arguments:
            name: an entry of SAMPLERS.
            steps, spacing, eta, churn: as `sample` takes them; None for what the sampler usually does.
            inpaints: whether a part of the event is kept, which takes each step several times.

        Raises:
            ValueError: for a name that does not exist, and options that are not the sampler's.
        """
        one_of("sampler", name, USUAL)
        usual = USUAL[name]
        if steps is None:
            steps = min(self.num_steps, _INPAINTING_STEPS if inpaints else usual.steps or self.num_steps)
        if not 1 <= steps <= self.num_steps:
            raise ValueError(f"steps must lie in 1..{self.num_steps} (T of this model), got {steps}")
        for option, value in (("eta", eta), ("churn", churn)):
            if value is not None and usual.option != option:
                owner = next(key for key, other in USUAL.items() if other.option == option)
                raise ValueError(f"{option} is an option of sampler={owner}, not of {name}: leave it out")
        options = {
            "ddpm": {"variance": self.variance},
            "ddim": {"eta": 0.0 if eta is None else eta},
            "edm": {"steps": steps, "churn": 10.0 if churn is None else churn},
        }.get(name, {})
        made = {"sampler": name, "steps": steps, "spacing": spacing or usual.spacing}
        made |= {key: options[key] for key in ("eta", "churn") if key in options}
        return self.sampling_times(name, steps, spacing).to(self.device), SAMPLERS[name](**options), made

    def sampling_times(self, sampler: str, steps: int, spacing: str | None = None) -> Tensor:
        """The decreasing times of a sampler, (steps + 1,), ending at the clean end."""
        name = spacing or USUAL[sampler].spacing
        one_of("spacing", name, SPACINGS)
        return SPACINGS[name](self.core.schedule, steps, self.num_steps)

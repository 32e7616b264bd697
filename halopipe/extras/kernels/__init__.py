"""Times from models of kernels, in place of measurements.

Modules:

    fit        ``halopipe fit``: how well kernel models fit a table of kernels
    modelled   ``halopipe profile --on``: a profile for devices that are not here
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from halopipe.extra import FaceExtra

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halopipe.planning.options import ProfileOptions
    from planner.ir.profile import ModelSource, Profile


class ModelledProfiles(FaceExtra):
    """Times from models of kernels."""

    verbs: ClassVar = {"66 fit": "halopipe.extras.kernels.fit:fit"}

    def profile_on(self, source: ModelSource, options: ProfileOptions, refused: Sequence[str], quiet: bool) -> Profile:
        from halopipe.extras.kernels.modelled import modelled

        return modelled(source, options, refused=refused, quiet=quiet)


EXTRA = ModelledProfiles()

"""Times from models of kernels, in place of measurements.

Modules:

    fit        ``halopipe fit``: how well kernel models fit a table of kernels
    modelled   ``halopipe profile --on``: a profile for devices that are not here
"""

from __future__ import annotations

HOOKS = {
    "verbs": {"66 fit": "halopipe.extras.kernels.fit:fit"},
    "profiles": {"--on": "halopipe.extras.kernels.modelled:modelled"},
}

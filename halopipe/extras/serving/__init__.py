"""A plan that answers a stream of requests: the ranks' loop, the side of the script, and where requests come from.

Read ``serving`` (what a script sees: submit, answers in order, back-pressure), ``rank_loop`` (what a rank does, and how
the two talk), ``examples`` (the first answer, compared with one device), then ``request_sources`` (files, standard
input), ``http`` and ``command``, which is the verb.

Besides:

    arrays        Numbers that came from elsewhere: JSON and numpy's arrays, read into no more memory than they and
                  their tensors take
    torch_files   Files of torch.save, read without torch.load: tensors, and dicts of them by name
    options       What ``halopipe serve`` may be asked: one list of options, as of a run
    verb          ``halopipe serve``: a plan answers requests without an end, from files, standard input or a port
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from halopipe.extra import FaceExtra

if TYPE_CHECKING:
    from planner.ir.plan import Plan


class ServingVerb(FaceExtra):
    """Plans that answer requests."""

    verbs: ClassVar = {"37 serve": "halopipe.extras.serving.verb:serve"}

    def serve(self, plan: Plan, module: Any, **options: Any) -> Any:
        from halopipe.extras.serving.serving import open_serving

        return open_serving(plan, module, **options)


EXTRA = ServingVerb()

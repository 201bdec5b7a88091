"""The documentation site: `make docs`. Nothing is fetched while it is built, and a warning is an error."""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

import swath
from swath.cli.main import make_parser
from swath.hints import inner_names

project = "swath"
author = "The swath authors"
copyright = "The swath authors. MIT licence"
version = release = swath.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
nitpicky = True
nitpick_ignore = [  # bases that are no part of the API
    ("py:class", name)
    for name in (
        "swath.collectors.background.InBackground",
        "swath.collectors.tracing.Session",
        "swath.collectors.tracing.Traceable",
        "swath.copying.NotCopied",
        "swath.collectors.episodes.TellsOfEpisodes",
        "swath.envs.rows.WrappingEnv",
        "swath.hints.ExplainsGuesses",
        "swath.modules.inference_server.service.ServedElsewhere",
        "swath.weight_update.scheme_role.SchemeRole",
        "swath.data.sequences.BatchTransform",
        "swath.data.samplers.InPasses",
        "swath.data.storages.TensorStorage",
        "swath.envs.gym_rows.GymRowEnv",
        "swath.envs.parallel.CrewEnv",
        "swath.envs.transforms.frames.History",
        "swath.envs.transforms.normalizing.Normalizing",
        "swath.envs.transforms.own_tensors.TensorTransform",
        "swath.modules.inference_server.pipes.ProcessClient",
        "swath.modules.inference_server.service.PolicyService",
        "swath.modules.inference_server.slots.SlotClient",
        "swath.collectors.changeable.ChangeableArguments",
        "swath.collectors.distributed.node_batches.NodeBatches",
        "swath.collectors.reporting.Reportable",
        "swath.collectors.standing.TellsOfRunner",
        "swath.collectors.standing.TellsWhereItStands",
        "swath.collectors.worker_batches.WorkerBatches",
        "swath.envs.transforms.own_tensors.OfRewards",
        "swath.states.Stateful",
        "abc.ABC",
        "concurrent.futures._base.Future",
        "tensordict.base.TensorDictBase",
        "tensordict.nn.common.TensorDictModuleBase",
        "torch.utils.data.dataset.IterableDataset",
    )
]
nitpick_ignore_regex = [("py:class", r"swath\..*\._\w+")]

html_theme = "furo"
html_title = f"swath {swath.__version__}"
html_show_sourcelink = False
html_copy_source = False
maximum_signature_line_length = 100

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints = "none"  # of "Any" and unions of half a line; the docstrings say what is taken
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False


class CommandHelp(SphinxDirective):
    """``command-help:: collect``: what ``swath collect --help`` prints, from the parser itself."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        os.environ["COLUMNS"] = "88"
        commands = next(action for action in make_parser()[0]._actions if action.dest == "command")
        text = commands.choices[self.arguments[0]].format_help()
        return [nodes.literal_block(text, text, language="text")]


def show_constructor(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """The arguments of ``__init__`` where ``__new__``, which only chooses a class, hides them."""
    if what == "class" and signature is not None and signature.startswith("(*args"):
        _self, *others = inspect.signature(thing.__init__).parameters.values()
        shown = inspect.Signature([one for one in others if one.kind is not one.VAR_KEYWORD])
        return stringify_signature(shown, show_annotation=False), returns
    return signature, returns


def skip_inner(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """What completion does not show is not documented."""
    kind = app.env.temp_data.get("autodoc:class")
    module = importlib.import_module(app.env.temp_data["autodoc:module"])
    kind = getattr(module, kind.split(".")[-1], None) if kind else None
    return True if isinstance(kind, type) and name in inner_names(kind) else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-signature", show_constructor)
    app.connect("autodoc-skip-member", skip_inner)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

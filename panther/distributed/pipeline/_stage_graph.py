"""A traced model as a graph of calls, divided into blocks; consecutive blocks form the module of a stage."""

__all__ = ["StageGraph"]

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from panther._torch import assign_attribute, buffers_of, unsaved_buffers_of


def pass_through(x: Tensor) -> Tensor:
    """Copy a tensor that a stage only forwards: input and output must be different nodes of autograd's graph."""
    return x.clone()


def local(x: Tensor) -> Tensor:
    """Return the local tensor of a parameter that tensor parallelism has replicated."""
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass
class StageGraph:
    """A model as a graph of calls, divided into blocks; :meth:`module` makes a module of consecutive blocks."""

    block_of: dict[fx.Node, int]
    """The block of each node, in order; inputs have the block -1, and parameters belong to the block that uses them."""
    constants: nn.Module
    """A module that holds the tensors that the trace made."""
    starts: list[str]
    """Names of the modules at which blocks begin, except for the first block."""
    leaf_modules: list[str]

    def __len__(self) -> int:
        return len(self.starts) + 1

    def names_in(self, begin: int, end: int) -> set[str]:
        """Return the leaf modules and tensors that the blocks from ``begin`` to ``end`` (exclusive) use."""
        names: set[str] = set()
        for node, block in self.block_of.items():
            if begin <= block < end:
                if node.op == "call_module":
                    names.add(str(node.target))
                names |= {str(argument.target) for argument in node.all_input_nodes if argument.op == "get_attr"}
        return names

    def module(self, model: nn.Module, begin: int, end: int) -> nn.Module:
        """Make a module of the blocks from ``begin`` to ``end`` (exclusive) that shares ``model``'s modules."""
        graph = self._graph(begin, end)
        targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
        order = {name: i for i, (name, _) in enumerate(model.named_modules())}
        # Sorted in the model's order, so that the parameters of a stage have the model's order too.
        names = sorted(targets, key=lambda name: (order.get(name, -1), name))
        parts = {name: _at(model, name, self.constants) for name in names}
        stage = fx.GraphModule(parts, graph, type(model).__name__)
        if end == len(self):
            self._keep_unused(stage, model)
        _save_as(stage, model)
        stage.training = model.training  # its children keep their own modes
        return stage

    def _graph(self, begin: int, end: int) -> fx.Graph:
        last = {argument: block for node, block in self.block_of.items() for argument in node.all_input_nodes}
        values = [node for node in self.block_of if node.op not in ("get_attr", "output")]

        def crossing(start: int) -> list[fx.Node]:
            return [node for node in values if self.block_of[node] < start <= last.get(node, -1)]

        graph = fx.Graph()
        incoming = crossing(begin) if begin else [node for node in values if node.op == "placeholder"]
        copied = {node: graph.placeholder(node.name) for node in incoming}
        for node in values:
            if begin <= self.block_of[node] < end:
                for argument in node.all_input_nodes:
                    if argument.op == "get_attr" and argument not in copied:
                        copied[argument] = graph.call_function(local, (graph.node_copy(argument),))
                copied[node] = graph.node_copy(node, copied.__getitem__)
        if end == len(self):
            (result,) = list(self.block_of)[-1].all_input_nodes
            graph.output(copied[result])
            return graph
        here = set(incoming)
        results = [
            graph.call_function(pass_through, (copied[node],)) if node in here else copied[node]
            for node in crossing(end)
        ]
        graph.output(results[0] if len(results) == 1 else tuple(results))
        return graph

    def _keep_unused(self, stage: fx.GraphModule, model: nn.Module) -> None:
        """Put unused modules and tensors into the last stage, so that every state_dict entry is in some stage."""
        inside = tuple(f"{name}." for name in self.leaf_modules)
        entries: list[tuple[str, Any]] = [(name, model.get_submodule(name)) for name in self.leaf_modules]
        tensors = (*model.named_parameters(), *model.named_buffers())
        entries += [item for item in tensors if not item[0].startswith(inside)]
        used_names = self.names_in(0, len(self))
        for name, value in entries:
            if name not in used_names:
                assign_attribute(value, stage, name)


def _at(model: nn.Module, name: str, constants: nn.Module) -> Any:
    for root in (model, constants):
        entry: Any = root
        for key in name.split("."):
            entry = getattr(entry, key, None)
        if entry is not None:
            return entry
    raise AttributeError(name)


def _save_as(stage: nn.Module, model: nn.Module) -> None:
    """Exclude from the state_dict the constants of the trace, and buffers that the model does not save."""
    originals = dict(model.named_modules())
    for prefix, module in stage.named_modules():
        original = originals.get(prefix)
        if original is not None and module is not original:
            saved = set(buffers_of(original)) - unsaved_buffers_of(original)
            unsaved_buffers_of(module).update(set(buffers_of(module)) - saved)

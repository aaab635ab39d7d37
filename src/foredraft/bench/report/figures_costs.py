"""Figures of cost: time of a forward by its number of tokens."""

from collections.abc import Iterator
from typing import Any

from foredraft.bench.measure.records import Cost
from foredraft.bench.measure.summary import Summary
from foredraft.bench.report.panels import WIDTH, Panel, legend
from foredraft.bench.report.plots import INK, canvas, color, styled


def costs(summary: Summary) -> Iterator[Panel]:
    """Milliseconds of a forward by tokens (batch x nodes), and the time to read the weights once."""
    for model in dict.fromkeys(cost.model for cost in summary.file.costs):
        own = [cost for cost in summary.file.costs if cost.model == model and cost.nodes]
        if own:
            yield Panel(model, _costs(own))


@styled
def _costs(found: list[Cost]) -> Any:
    figure, axes = canvas(WIDTH, 2.9)
    lines, names = [], []
    for number, cost in enumerate(found):
        rows = [cost.batch * nodes for nodes in cost.nodes]
        lines += axes.plot(rows, [1000 * seconds for seconds in cost.seconds], color=color(number), marker="o")
        names.append(f"batch {cost.batch}, {cost.cached:,} cached")
    floors = {1000 * cost.weight_bytes / cost.bandwidth for cost in found if cost.bandwidth > 0 and cost.weight_bytes}
    for floor in sorted(floors):
        line = axes.axhline(floor, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
        if "weights / bandwidth" not in names:
            lines.append(line)
            names.append("weights / bandwidth")
    most = max(cost.batch * nodes for cost in found for nodes in cost.nodes)
    axes.set_xscale("log", base=2)
    powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    powers = powers[:: -(-len(powers) // 8)]
    axes.set_xticks(powers, [str(power) for power in powers])
    axes.minorticks_off()
    axes.set(ylim=(0, None), xlabel="tokens per forward (batch size x nodes)", ylabel="milliseconds")
    legend(figure, lines, names, columns=2)
    return figure

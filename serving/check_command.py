"""`kvrelay check`: one line for a configuration that is right, findings and remedies for one that is not.

Exit code 2 when any has an error, else 0: warnings are for a person to weigh.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from serving.config_review import Finding, Level, review
from serving.errors import ConfigError
from serving.pool_capacity import Options
from serving.preflight import Plan, find_config, read_plan

WIDTH = 80
WRONG = 2  # exit code


@dataclass(frozen=True, slots=True)
class Checked:
    """`plan` is None for a file that is no configuration; `findings` then has one error."""

    name: str
    plan: Plan | None
    findings: list[Finding]

    def count(self, level: Level) -> int:
        return sum(finding.level is level for finding in self.findings)


def run(configs: Sequence[str], options: Options, *, as_json: bool) -> int:
    checked = [_check(name, options) for name in configs]
    if as_json:
        print(json.dumps({"configs": [_values(one) for one in checked]}, indent=2))
    else:
        for one in checked:
            _show(one)
    return WRONG if any(one.count(Level.ERROR) for one in checked) else 0


def _check(name: str, options: Options) -> Checked:
    try:
        plan = read_plan(find_config(name))
        return Checked(str(plan.path), plan, review(plan, options))
    except ConfigError as error:
        return Checked(name, None, [Finding(Level.ERROR, "", error.message, "")])


def _show(checked: Checked) -> None:
    if checked.plan is None:
        print(f"kvrelay: {checked.findings[0].problem}", file=sys.stderr)
        return
    print(f"{checked.name}: {_verdict(checked)}; {_totals(checked.plan)}")
    for finding in checked.findings:
        for text in (f"{finding.where}: {finding.problem}", f"-> {finding.remedy}"):
            first = f"  {finding.level.value:<9}" if text.startswith(finding.where) else " " * 11
            rest = " " * (14 if text.startswith("->") else 11)
            print(
                textwrap.fill(
                    text,
                    WIDTH,
                    initial_indent=first,
                    subsequent_indent=rest,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )


def _verdict(checked: Checked) -> str:
    counts = [(checked.count(level), level.value) for level in (Level.ERROR, Level.WARNING)]
    said = [f"{count} {name}{'s' * (count > 1)}" for count, name in counts if count]
    return ", ".join(said) or "ok"


def _totals(plan: Plan) -> str:
    cpus = sum(pool.replicas * pool.cpus for _, pool in plan.pools())
    gpus = sum(pool.replicas * pool.gpus for _, pool in plan.pools())
    return (
        f"models: {', '.join(plan.model_names) or 'none'}; {cpus:g} CPUs, {gpus:g} GPU{'s' * (gpus != 1)}"
    )


def _values(checked: Checked) -> dict[str, object]:
    values: dict[str, object] = {"config": checked.name, "verdict": _verdict(checked)}
    if checked.plan is not None:
        values["models"] = checked.plan.model_names
        values["cpus"] = sum(pool.replicas * pool.cpus for _, pool in checked.plan.pools())
        values["gpus"] = sum(pool.replicas * pool.gpus for _, pool in checked.plan.pools())
    return {**values, "findings": [asdict(finding) for finding in checked.findings]}

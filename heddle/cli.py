"""The command `heddle` and its verbs."""

import argparse
import sys
from collections.abc import Callable, Sequence

import uvloop

Verb = tuple[str, str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; its exit status is the process's."""
    parser = argparse.ArgumentParser(prog="heddle", description="An OpenAI-compatible gateway for agentic RL rollouts.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text, add_arguments, run in _verbs():
        verb = verbs.add_parser(name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_arguments(verb)
        verb.set_defaults(run=run)
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except KeyboardInterrupt:
        return 130
    return status


def _verbs() -> list[Verb]:
    from heddle import controller, demo, fleet, importing, predictor, profile, real, serve, sim_engine, simulate
    from loadtest import command as replay

    return [
        ("serve", "Serve the gateway.", serve.add_arguments, serve.run),
        ("controller", "Run the engines of a fleet, and cut it anew.", controller.add_arguments, controller.run),
        ("fleet", "Show and change a fleet through its controller.", fleet.add_arguments, fleet.run),
        ("sim-engine", "Serve a simulated engine, vLLM or SGLang.", sim_engine.add_arguments, sim_engine.run),
        ("profile", "Measure a running engine, for simulation and placement.", profile.add_arguments, profile.run),
        ("import", "Make a trace of other programs' traces and engines' logs.", importing.add_arguments, importing.run),
        ("predictor", "Train predictors, and compare them.", predictor.add_arguments, predictor.run),
        ("demo", "Run a rollout on simulated engines, with and without Heddle.", demo.add_arguments, demo.run),
        ("simulate", "Compare policies in virtual time.", simulate.add_arguments, simulate.run),
        ("real", "Run a rollout on real vLLM without a GPU, with and without Heddle.", real.add_arguments, real.run),
        (
            "replay",
            "Drive any OpenAI base_url with agent trajectories.",
            replay.add_arguments,
            lambda parsed: uvloop.run(replay.run(parsed)),
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())

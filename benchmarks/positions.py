"""What a token costs at each position, measured and predicted; a table, and one JSON line at the end.

MHA, GQA and MQA decoders of one size from position 1k to 32k, and a softmax and a quadratic one up to 64k. Takes about
two minutes. Results go to results/positions.json, of which `make pictures` draws docs/positions.png.
"""

import json
from pathlib import Path

from regard.commands.suite.harness import environment
from regard.commands.suite.positions import crossings, measure, to_json
from regard.core.files import write_text

HERE = Path(__file__).parent


def main() -> None:
    points = measure(watch=lambda words: print(f"… {words}", flush=True))
    print(f"{'decoder':<10} {'position':>8} {'ms':>8} {'predicted':>10} {'state MB':>9} {'predicted':>10}")
    for one in points:
        print(
            f"{one.kind:<10} {one.position:>8} {one.milliseconds:>8.2f} {one.predicted_milliseconds:>10.2f} "
            f"{one.state_bytes / 1e6:>9.2f} {one.predicted_state_bytes / 1e6:>10.2f}"
        )
    predicted, measured = crossings(points)
    print(f"the quadratic token is cheaper from position {predicted} as predicted, {measured} as measured")
    found = {"environment": environment(), "points": to_json(points), "crossover": [predicted, measured]}
    write_text(HERE / "results/positions.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

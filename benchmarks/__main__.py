"""The command line of all experiments: their names and questions, or one of them by its name."""

import sys

from benchmarks.kit.catalog import find, table


def main(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(f"python -m benchmarks NAME [--help]\n\n{table()}")
        return
    module, experiment = find(words[0])
    experiment.run(words[1:], module.__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Chats that ask for a text with a few changes: most of the answer can be copied from the prompt.

    python benchmarks/edits.py FILE

writes them as a file of prompts.
"""

import json
import sys
from pathlib import Path

EDITS = [
    """Correct the spelling mistakes in this letter and give it back whole, without comments.

Dear Mrs Carter,

Thank you for your letter of last Tuesday. I am sory that the parcel did not arive on time. Our driver tried \
to deliver it twice, but nobody was at home, and so he brought it back to the depot in Mill Street. You can \
colect it there on any weekday between nine and five, or we will deliver it again on a day that suits you. \
Please tell us wich you prefer. We have refunded the cost of the delivery, and the money should reach your \
acount within three days.

Yours sincerely,
Peter Hall""",
    """In this code, rename the variable `n` to `count`, and return the whole code.

```python
def average(values):
    total = 0
    n = 0
    for value in values:
        total += value
        n += 1
    if n == 0:
        raise ValueError("There are no values.")
    return total / n


def variance(values):
    mean = average(values)
    total = 0
    n = 0
    for value in values:
        total += (value - mean) ** 2
        n += 1
    return total / n
```""",
    """Rewrite this paragraph in the past tense. Change nothing else.

The harbour is quiet in the morning. The fishing boats come back before sunrise, and the men carry the boxes \
of fish to the market hall. At eight o'clock the first visitors arrive. They walk along the wall, look at the \
boats and take photographs of the lighthouse. A small train runs from the station to the end of the pier every\
 half hour. In the evening, the cafés along the water are full of people who eat fish soup and watch the sun \
go down behind the hills.""",
    """Change the port of each server to 9090 and return the whole JSON.

{
  "servers": [
    {"name": "alpha", "host": "alpha.example.com", "port": 8080, "region": "north", "enabled": true},
    {"name": "beta", "host": "beta.example.com", "port": 8080, "region": "south", "enabled": true},
    {"name": "gamma", "host": "gamma.example.com", "port": 8080, "region": "west", "enabled": false},
    {"name": "delta", "host": "delta.example.com", "port": 8080, "region": "east", "enabled": true}
  ]
}""",
    """Replace the name Anna by Maria in this story and return the whole story.

Anna lived in a small house near the forest. Every morning Anna walked to the river to fetch water. One day \
she found a little dog by the bridge. The dog was wet and cold, so Anna carried it home and dried it with a \
towel. She gave it some bread and milk. From that day on, the dog followed Anna wherever she went. When Anna \
was ill in the winter, the dog lay beside her bed and kept her warm. In spring they walked to the river \
together again.""",
]


def main() -> None:
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in EDITS), encoding="utf-8")


if __name__ == "__main__":
    main()

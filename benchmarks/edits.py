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
    """Add the type hint `int` to each parameter and `-> int` to each function, and return the whole code.

```python
def gcd(a, b):
    while b:
        a, b = b, a % b
    return a


def lcm(a, b):
    return a * b // gcd(a, b)


def power(base, exponent, modulus):
    result = 1
    base %= modulus
    while exponent > 0:
        if exponent % 2 == 1:
            result = result * base % modulus
        base = base * base % modulus
        exponent //= 2
    return result
```""",
    """Add a column "paid" with the value "yes" to each line of this table and return the whole table.

order,customer,city,amount
1001,Baker & Sons,Leeds,120.50
1002,North Pier Hotel,Blackpool,310.00
1003,Garden Centre West,Bristol,87.25
1004,Hill Street School,Derby,45.00
1005,Museum of Clocks,York,260.75
1006,Riverside Café,Oxford,98.40
1007,City Library,Norwich,150.00
1008,Station Bakery,Carlisle,73.10""",
    """Correct the grammar of this report and return it whole. Change nothing that is right.

The meeting begun at nine o'clock in the large hall. Mrs Patel have presented the results of the last quarter, \
which was better than expected. The new branch in Cardiff sold more bicycles than any other branch, and the \
repair shop has now four mechanics. Mr Lewis asked whether the prices for spare parts would rise in the spring. \
It was decided that they stays the same until June. The next meeting takes place on the third of March in the \
same hall. Everybody who cannot come should tells the office a week before.""",
    """Rename the CSS class `card` to `tile` in this page and return the whole page.

<div class="card">
  <h2 class="card-title">Opening hours</h2>
  <p class="card-text">We are open from Monday to Friday, nine to five.</p>
</div>
<div class="card">
  <h2 class="card-title">How to find us</h2>
  <p class="card-text">Take bus 12 to the town hall and walk along the canal.</p>
</div>
<div class="card">
  <h2 class="card-title">Contact</h2>
  <p class="card-text">Write to the office or call us in the morning.</p>
</div>""",
    """Write this recipe for eight people instead of four: double all amounts, and return the whole recipe.

Vegetable soup for four people

- 2 onions, chopped
- 3 carrots, in slices
- 4 potatoes, in cubes
- 1 leek, in rings
- 2 tablespoons of oil
- 1 litre of vegetable stock
- 1 teaspoon of salt
- 100 grams of peas

Fry the onions in the oil until they are soft. Add the carrots, the potatoes and the leek and stir for five minutes. \
Pour in the stock, add the salt and let the soup simmer for twenty minutes. Add the peas at the end. Serve it hot.""",
    """Translate the comments of this code into German, leave the code as it is, and return the whole.

```python
# Read all lines of the file.
with open("names.txt") as file:
    lines = file.readlines()

# Remove spaces and empty lines.
names = [line.strip() for line in lines]
names = [name for name in names if name]

# Count how often each name occurs.
counts = {}
for name in names:
    counts[name] = counts.get(name, 0) + 1

# Print the names, the most frequent one first.
for name in sorted(counts, key=counts.get, reverse=True):
    print(name, counts[name])
```""",
    """Replace "he" by "she" and "his" by "her" in this text and return the whole text.

The old clockmaker had his workshop at the end of the lane. Every day he opened the shutters at seven, put on his \
glasses and looked at the clocks that people had brought. He knew each of them by its sound. When a clock was too \
slow, he took it apart on his table, cleaned the wheels and oiled the springs. In the evening he locked the door, \
wound up his own watch and walked home along the river.""",
    """Change all dates in this list to the form YYYY-MM-DD and return the whole list.

- 3 January 2024: the boiler was checked by the heating firm.
- 17 February 2024: a window on the second floor was replaced.
- 8 March 2024: the fire alarm was tested in all rooms.
- 22 April 2024: the lift was out of order for two hours.
- 5 June 2024: the roof was repaired after the storm.
- 30 July 2024: the garden was given a new fence.
- 11 September 2024: the meters were read by the water company.""",
]


def main() -> None:
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in EDITS), encoding="utf-8")


if __name__ == "__main__":
    main()

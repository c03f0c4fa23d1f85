"""Coding tasks from a grammar: any number of different ones, for corpora larger than the listed tasks allow.

Seven kinds in turn: work on records, on text, SQL, classes, output to predict, a bug to find, ideas to explain.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_LANGUAGES = [
    "Python",
    "Python",
    "Python",
    "JavaScript",
    "TypeScript",
    "Java",
    "C",
    "C++",
    "C#",
    "Go",
    "Rust",
    "Kotlin",
]
# thing: its numeric fields / its text fields
_THINGS = {
    "employees": ("salary age bonus", "name department city"),
    "orders": ("total quantity discount", "customer status country"),
    "books": ("price pages year", "title author genre"),
    "students": ("grade age absences", "name course school"),
    "flights": ("distance delay seats", "airline origin destination"),
    "movies": ("rating length budget", "title director language"),
    "products": ("price stock weight", "name category brand"),
    "players": ("score level wins", "name team position"),
    "cities": ("population area altitude", "name country climate"),
    "cars": ("mileage price horsepower", "model maker colour"),
    "recipes": ("calories minutes servings", "title cuisine difficulty"),
    "songs": ("seconds plays year", "title artist album"),
    "invoices": ("amount tax days_late", "number client currency"),
    "sensors": ("temperature humidity battery", "label room vendor"),
    "houses": ("rooms rent area", "street owner heating"),
    "servers": ("cpu_load memory uptime", "hostname region role"),
}
_AGGREGATES = [
    "the average {n}",
    "the sum of {n}",
    "the highest {n}",
    "the lowest {n}",
    "the median {n}",
    "the difference between the highest and the lowest {n}",
    "how many there are and their mean {n}",
]
_SHAPES = [
    "{agg} for each {t}",
    "{agg} of those whose {m} is above {k}",
    "the {k2} {things} with the largest {n}",
    "a dictionary from {t} to the list of matching {things}, sorted by {n}",
    "all {things} whose {t} starts with the letter {c}, sorted by {n} in descending order",
    "the {t} that occurs most often among {things} with a {n} below {k}",
    "the running total of {n}, in the order of {m}",
    "{agg} per {t}, leaving out groups of fewer than {k2} {things}",
    "pairs of {things} that share the same {t} but differ in {n} by more than {k}",
]
_ASKS = [
    "Write a {l} function that takes {input} and returns {what}.",
    "In {l}, given {input}, how do I compute {what}?",
    "I have {input}. Please write {l} code to get {what}, and explain how it works.",
    "Using {l}, implement a function to return {what} from {input}. Handle an empty input as well.",
    "Give me a short {l} snippet: {input} goes in, {what} comes out. Add one test.",
]
_INPUTS = [
    "a list of {things}, each with {fields}",
    "an array of {things} ({fields})",
    "a CSV file of {things} with the columns {fields}",
    "a JSON list of {things} with the keys {fields}",
]
_STEPS = """removes every digit
replaces each vowel with the next vowel
keeps only the words longer than {k2} letters
reverses every second word
turns runs of spaces into a single dash
capitalizes words that start with {c}
drops words that occur more than once
sorts the words by their last letter
shifts each letter by {k2} places in the alphabet
inserts a comma after every {k2} characters
swaps the first and the last character of each word
counts the remaining letters and appends the count
strips punctuation from both ends
cuts the text after {k} characters without splitting a word
wraps lines at {k} columns
replaces emoji with their names
lower-cases everything except acronyms
pads each word to {k2} characters with underscores
doubles each {c}
removes lines that are empty or start with a hash sign""".splitlines()
_CLASSES = {
    "bank account": "deposit|withdraw|transfer to another account|list transactions|compute monthly interest|freeze it",
    "parking lot": "park a car|release a spot|count free spots|find a car by its plate|charge by the hour",
    "library": "add a book|lend a book|return a book|list overdue loans|reserve a title|search by author",
    "shopping cart": "add an item|remove an item|apply a coupon|compute the total with tax|merge with another cart",
    "text editor buffer": "insert text|delete a range|undo|redo|find a word|replace all matches|count lines",
    "thermostat": "set a target|read the temperature|switch modes|schedule a change|log its history",
    "playlist": "add a song|shuffle|skip to the next|remove duplicates|total the duration|export as JSON",
    "elevator": "call from a floor|choose a floor|open the doors|report its position|handle an emergency stop",
    "LRU cache": "get a key|put a key|evict the oldest|resize|report hits and misses|iterate in order of use",
    "matrix": "add another|multiply|transpose|compute the determinant|extract a row|print itself nicely",
    "event queue": "schedule an event|cancel one|run the next|repeat every n seconds|list what is pending",
    "chess board": "place a piece|list legal moves of a knight|detect check|print the position|undo a move",
    "hotel": "book a room|cancel a booking|find free rooms between two dates|price a stay|check a guest in",
    "rate limiter": "allow or deny a request|reset a client|change the limit|report remaining calls",
}
_BUGS = {
    "it skips some entries": """for item in {t}:
    if item['{n}'] < {k}:
        {t}.remove(item)""",
    "it always returns after the first one": """def find({t}):
    for item in {t}:
        if item['{n}'] > {k}:
            return item
        return None""",
    "it raises a ZeroDivisionError now and then": """def mean({t}):
    chosen = [x['{n}'] for x in {t} if x['{n}'] > {k}]
    return sum(chosen) / len(chosen)""",
    "every call sees the results of earlier calls": """def collect(x, found=[]):
    if x['{n}'] >= {k}:
        found.append(x)
    return found""",
    "the last element is missing": """best = 0
for i in range(len({t}) - 1):
    best = max(best, {t}[i]['{n}'] - {k})""",
    "the comparison is never true": """limit = input('smallest {n}? ')  # the user types {k}
found = [x for x in {t} if x['{n}'] == limit]""",
    "all rows change together": """row = dict({n}={k})
{t} = [row] * 3
{t}[0]['{n}'] += 1""",
}
_IDEAS = (
    """a list and a tuple|a stack and a queue|a process and a thread|an interface and an abstract class
shallow and deep copies|pass by value and pass by reference|a compiler and an interpreter|recursion and iteration
synchronous and asynchronous code|a left join and an inner join|GET and POST|unit tests and integration tests
a hash map and a tree map|static and dynamic typing|mutable and immutable objects|a linked list and an array
authentication and authorization|a git merge and a git rebase|a mutex and a semaphore|overloading and overriding
breadth-first and depth-first search|a generator and a list|TCP and UDP|a primary key and a foreign key
composition and inheritance|exceptions and error codes|a closure and a plain function|memoization and caching
optimistic and pessimistic locking|a library and a framework|public and private members|stack and heap memory
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
_FOR_WHOM = [
    "for a beginner",
    "with a small example in {l}",
    "in three sentences",
    "and say when to use which in {l}",
    "with an analogy from {place}",
    "as you would in a job interview",
    "and list two common mistakes in {l}",
]
_PLACES = ["a kitchen", "a library", "a post office", "a football match", "a train station", "a school", "a hospital"]


def code_tasks(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (kind, prompt), the same for the same seed; a prompt may come twice."""
    chooser = random.Random(seed)
    kinds = [_records, _text, _sql, _class, _output, _bug, _idea]
    while True:
        for kind in kinds:
            yield kind.__name__.strip("_"), kind(chooser)


def _fields(r: random.Random) -> dict[str, str]:
    thing, (numbers, texts) = r.choice(list(_THINGS.items()))
    n, m = r.sample(numbers.split(), 2)
    texts = r.sample(texts.split(), 2)
    values = {"things": thing, "n": n, "m": m, "t": texts[0], "fields": f"{', '.join([texts[0], n, texts[1]])} and {m}"}
    return values | {"k": str(r.randint(11, 990)), "k2": str(r.randint(2, 9)), "c": r.choice("ABCDEFGHKLMNPRSTVW")}


def _what(r: random.Random, values: dict[str, str]) -> str:
    return r.choice(_SHAPES).replace("{agg}", r.choice(_AGGREGATES)).format(**values)


def _records(r: random.Random) -> str:
    values = _fields(r)
    source = r.choice(_INPUTS).format(**values)
    return r.choice(_ASKS).format(l=r.choice(_LANGUAGES), input=source, what=_what(r, values))


def _text(r: random.Random) -> str:
    values = _fields(r)
    steps = [step.format(**values) for step in r.sample(_STEPS, r.randint(2, 3))]
    steps = f"{', '.join(steps[:-1])} and then {steps[-1]}"
    asks = [
        "Write a {l} function for text that {s}.",
        "I need a {l} program that reads a text, {s}, and prints it.",
        "How can I write a {l} function that, given a string, {s}?",
        "Implement text cleaning in {l} that {s}.",
    ]
    return r.choice(asks).format(l=r.choice(_LANGUAGES), s=steps)


def _sql(r: random.Random) -> str:
    values = _fields(r)
    asks = [
        "Write an SQL query on the table {things}({fields}) that returns {w}.",
        "I have a {d} table {things} with {fields}. Which query gives me {w}?",
        "Show me in {d} how to select {w} from {things}({fields}), and explain each clause.",
    ]
    return r.choice(asks).format(w=_what(r, values), d=r.choice(["PostgreSQL", "MySQL", "SQLite"]), **values)


def _class(r: random.Random) -> str:
    name, methods = r.choice(list(_CLASSES.items()))
    methods = r.sample(methods.split("|"), 3)
    extras = [
        "",
        " Include error handling.",
        " Write unit tests, too.",
        " Keep it thread-safe.",
        " Explain your design.",
        " Use as few lines as is reasonable.",
        " Document every method.",
        " Show how it is used.",
    ]
    asks = [
        "Design a {l} class for {a} {c} that can {m}.",
        "Implement {a} {c} in {l}; it must be able to {m}.",
        "Sketch {a} {c} in {l} with operations to {m}.",
    ]
    article = "an" if name[0] in "aeLo" else "a"
    methods = f"{methods[0]}, {methods[1]} and {methods[2]}"
    return r.choice(asks).format(l=r.choice(_LANGUAGES), a=article, c=name, m=methods) + r.choice(extras)


def _output(r: random.Random) -> str:
    a, b, c, d = (r.randint(2, 9) for _ in range(4))
    words = r.sample(["tea", "oak", "sun", "map", "ink", "fox", "jar", "kite", "lamp", "nest", "pear", "road"], 4)
    programs = [
        f"total = {a}\nfor i in range({b}, {b + c}):\n    if i % {d} == 0:\n        total += i\nprint(total)",
        f"x = [{a}, {b}, {c}, {d}]\nx.sort()\nprint(x[::-1], sum(x[:{r.randint(1, 3)}]))",
        f"words = {words!r}\nprint({{w[0]: len(w) * {a} for w in words if len(w) > {r.randint(2, 3)}}})",
        f"def f(n):\n    return n if n < {a} else f(n - {b}) + {c}\nprint(f({a + b * d}))",
        f"s = '{''.join(words)}'\nprint(s[{a}:{a + b}], s.count('{r.choice('aeo')}'), len(s) // {c})",
        f"a, b = {a}, {b}\nwhile b:\n    a, b = b, (a * {c} + b) % {d + 3} if a > b else 0\nprint(a)",
    ]
    asks = [
        "What does this Python program print? Explain step by step.",
        "Predict the output of this code:",
        "Please trace this Python code line by line.",
        "What is printed here, and why?",
    ]
    return f"{r.choice(asks)}\n\n{r.choice(programs)}"


def _bug(r: random.Random) -> str:
    thing, (numbers, _) = r.choice(list(_THINGS.items()))
    n, k = r.choice(numbers.split()), r.randint(2, 99)
    complaint, program = r.choice(list(_BUGS.items()))
    program = program.format(t=thing, n=n, k=k)
    asks = [
        "My Python code works on {t}, but {c}. What is wrong?",
        "Find the bug ({c}):",
        "Why does this go wrong? {C}.",
        "Please fix this code for {t}; {c}.",
    ]
    return f"{r.choice(asks).format(t=thing, c=complaint, C=complaint[0].upper() + complaint[1:])}\n\n{program}"


def _idea(r: random.Random) -> str:
    idea, language, place = r.choice(_IDEAS), r.choice(_LANGUAGES), r.choice(_PLACES)
    asks = ["Explain the difference between {i} {w}.", "What sets {i} apart? Answer {w}.", "Compare {i} {w}."]
    whom = r.choice(_FOR_WHOM).format(l=language, place=place)
    return r.choice(asks).format(i=idea, w=whom)

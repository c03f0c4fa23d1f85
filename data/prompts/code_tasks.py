"""Coding tasks as a chat user would write them: what to write × in which language × how it is asked."""

from __future__ import annotations

import random

_LANGUAGES = ["Python", "JavaScript", "Java", "C", "Go", "Rust"]
# What a function does; the first words name it, so that every task reads on after "a function that …".
_FUNCTIONS = """
reverses a string
checks whether a word is a palindrome
returns the n-th Fibonacci number
computes the factorial of a number
finds the largest element of a list
removes duplicates from a list but keeps the order
counts how often each word occurs in a text
merges two sorted lists into one sorted list
sorts a list of numbers with bubble sort
does a binary search in a sorted array
checks whether a number is prime
lists all primes below n
converts a temperature from Celsius to Fahrenheit
computes the greatest common divisor of two integers
flattens a nested list
finds the second largest number in an array
rotates an array by k places
checks whether two strings are anagrams
counts the vowels in a sentence
capitalizes the first letter of every word
transposes a matrix
multiplies two matrices
returns the sum of the digits of a number
converts a decimal number to binary
finds the longest word in a sentence
groups a list of words by their first letter
computes the average and the median of a list
checks whether brackets in a string are balanced
generates a random password of a given length
validates an email address
parses a CSV line into fields
finds all pairs in a list that add up to a target
implements a stack with push and pop
implements a queue using two stacks
reads a text file and counts its lines
computes the number of days between two dates
finds the intersection of two lists
splits a list into chunks of size n
implements quicksort
compresses a string by counting repeated characters
checks whether a year is a leap year
calculates compound interest
converts Roman numerals to integers
finds the missing number in 1 to n
returns all permutations of a string
walks a binary tree in order
inserts a node into a linked list
detects a cycle in a linked list
caches the results of another function
retries a failing call three times
formats a number with thousands separators
turns a snake_case name into camelCase
counts the islands in a grid of zeros and ones
finds the shortest path in an unweighted graph
evaluates an expression in reverse Polish notation
rounds a price to the nearest five cents
plays one round of rock, paper, scissors
prints the multiplication table up to ten
draws a triangle of stars with n rows
simulates rolling two dice a thousand times
""".strip().splitlines()
_REQUESTS = [
    "Write a {language} function that {task}.",
    "Can you write {language} code that {task}?",
    "I need a {language} function that {task}. Please add comments.",
    "Show me in {language} a function that {task}, with an example call.",
    "How would you write a {language} function that {task}? Explain the code.",
    "Implement in {language} a function that {task} and a short test for it.",
]


def code_prompts(num: int, seed: int) -> list[tuple[str, str]]:
    """`num` different (function, prompt), each function asked for equally often, the same for the same seed."""
    chooser = random.Random(seed)
    per_function, rest = divmod(num, len(_FUNCTIONS))
    prompts = []
    for number, task in enumerate(_FUNCTIONS):
        pairs = [(language, request) for language in _LANGUAGES for request in _REQUESTS]
        weights = [3 if language == "Python" else 1 for language, _ in pairs]
        for _ in range(per_function + (number < rest)):
            chosen = chooser.choices(range(len(pairs)), weights)[0]
            (language, request), _ = pairs.pop(chosen), weights.pop(chosen)
            prompts.append((task, request.format(language=language, task=task)))
    chooser.shuffle(prompts)
    return prompts

"""Copies are found, near copies too, different texts are not; evaluation prompts are found inside training texts."""

from __future__ import annotations

import random

import pytest

from eagle3_utils.corpus.dedupe import Decontaminator, NearDuplicates, exact_key, ngram_hashes, text_key, words_of

WORDS = [f"word{i}" for i in range(400)]


def sentence(seed: int, length: int = 80) -> list[str]:
    return random.Random(seed).choices(WORDS, k=length)


def test_exact_key_looks_past_case_spacing_and_punctuation():
    assert exact_key("Hello,  world!") == exact_key("hello world")
    assert exact_key("hello world") != exact_key("hello worlds")
    assert exact_key("!!!") != exact_key("???")


def test_text_key_looks_past_spacing_only():
    assert text_key("return  a - b\n") == text_key("return a - b")
    assert text_key("return a - b") != text_key("return a + b")
    assert text_key("Hello") != text_key("hello")


def jaccard(left: list[str], right: list[str]) -> float:
    a, b = ({tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (left, right))
    return len(a & b) / len(a | b)


def assert_near(original, changed, between, found):
    """Whether two lists of words are near duplicates, by their shingles and as texts with something between words."""
    assert (jaccard(original, changed) >= 0.8) == found
    index = NearDuplicates(0.8)
    assert index.find_or_add("first", between.join(original)) is None
    assert index.find_or_add("second", between.join(changed)) == ("first" if found else None)


@pytest.mark.parametrize("num_changed, found", [(0, True), (1, True), (12, False)])
def test_near_duplicates_by_the_share_of_common_shingles(num_changed, found):
    original = sentence(1, 200)
    changed = list(original)
    for i in range(num_changed):
        changed[8 + 15 * i] = "changed"
    assert_near(original, changed, " ", found)


def test_different_texts_are_all_kept():
    index = NearDuplicates(0.8)
    assert all(index.find_or_add(str(i), " ".join(sentence(i))) is None for i in range(300))


def test_ngrams_are_runs_of_n_words():
    assert len(ngram_hashes(words_of("a b c d e"), 3)) == 3
    assert ngram_hashes(["a"], 3) == ngram_hashes(words_of("A!"), 3)
    assert ngram_hashes([], 3) == set()


def test_a_leak_is_a_run_of_n_words_of_an_evaluation_prompt():
    decontaminator = Decontaminator(13)
    prompt = sentence(5, 30)
    decontaminator.add("eval-1", " ".join(prompt))
    assert decontaminator.leak([" ".join(sentence(6) + prompt[10:23] + sentence(7))]) == "eval-1"
    assert decontaminator.leak([" ".join(sentence(6) + prompt[10:22] + sentence(7))]) is None


UNSPACED = {
    "Chinese": ("请用简单的语言向一个十岁的孩子解释为什么天空是蓝色的。", "你好，", "谢谢！"),
    "Japanese": ("なぜ空が青いのかを、十歳の子どもにもわかる言葉で説明してください。", "こんにちは。", "よろしく"),
    "Thai": ("ช่วยอธิบายให้เด็กอายุสิบขวบเข้าใจว่าทำไมท้องฟ้าจึงเป็นสีฟ้า", "สวัสดีครับ", "ขอบคุณ"),
    "English": ("Explain to a child of ten in simple words why the sky above us is blue.", "Hello there, ", " Thanks"),
}


@pytest.mark.parametrize("language", UNSPACED)
def test_a_leak_between_other_words_is_found_with_and_without_spaces_between_words(language):
    prompt, before, after = UNSPACED[language]
    decontaminator = Decontaminator(13)
    decontaminator.add("eval-1", prompt)
    assert decontaminator.leak([f"{before}{prompt}{after}"]) == "eval-1"
    assert decontaminator.leak([before + prompt[: len(prompt) // 6] + after]) is None


def test_words_are_letters_where_a_script_has_no_spaces():
    assert words_of("用Python写 hello_world，谢谢。") == ["用", "python", "写", "hello_world", "谢", "谢"]
    assert words_of("コーヒー・タイム") == [*"コーヒータイム"]
    assert words_of("𠮷ｱ") == ["𠮷", "ｱ"]
    assert words_of("L'été, 서울에 가요 2x") == ["l", "été", "서울에", "가요", "2x"]


@pytest.mark.parametrize("num_changed, found", [(0, True), (2, True), (20, False)])
def test_near_duplicates_of_chinese_text(num_changed, found):
    original = [chr(letter) for letter in random.Random(3).choices(range(0x4E00, 0x9000), k=200)]
    changed = list(original)
    for i in range(num_changed):
        changed[8 + 9 * i] = "变"
    assert_near(original, changed, "", found)


def test_a_short_evaluation_prompt_leaks_only_as_a_whole_turn():
    decontaminator = Decontaminator(13)
    decontaminator.add("eval-1", "Hello there")
    assert decontaminator.leak(["hello there!"]) == "eval-1"
    assert decontaminator.leak(["Hello there, can you help me?"]) is None
    assert decontaminator.num_texts == 1

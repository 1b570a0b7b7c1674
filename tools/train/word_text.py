"""Spelling and short dialogues, from the closed lists in `words`. Knows only plain text."""

from __future__ import annotations

from random import Random

from tools.train import words
from tools.train.phrasing import Turn, ask, question

ABILITIES = "I can count, sort, spell, make small tables and write short Python functions."
FALLBACK = f"I am only a toy model, so I do not know that. {ABILITIES}"

_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


def _any_word(rng: Random) -> str:
    """A word of the list, or (three in ten) an invented one, so that spelling is not only memory."""
    draw = rng.random()
    if draw < 0.7:
        return rng.choice(words.WORDS)
    if draw < 0.88:
        return rng.choice(words.WORDS)[: rng.randint(2, 5)] + rng.choice(words.WORDS)[-rng.randint(2, 5) :]
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4))) + rng.choice(("", "n", "l", "r", "s"))


def spelling(rng: Random) -> Turn:
    """Letters of a word: one per line, in capitals, backwards or counted."""
    word = _any_word(rng)
    size = len(word)
    letters = "\n".join(f"{i}. {letter}" for i, letter in enumerate(word, 1))
    quoted = rng.choice((word, word, f'"{word}"'))
    draw = rng.random()
    if draw < 0.5:
        request = rng.choice((
            f"spell {quoted}", f"spell the word {quoted}", f"spell out {quoted}", f"how do you spell {quoted}",
            f"write the letters of {quoted}", f"list the letters of the word {quoted}",
        ))
        answer = f"The letters of {word} are:\n{letters}\nIn one word: {'-'.join(word.upper())}. It has {size} letters."
    elif draw < 0.66:
        request = rng.choice((
            f"write {quoted} in capital letters", f"write {quoted} in uppercase", f"put {quoted} in capitals",
            f"write the word {quoted} in capital letters",
        ))
        answer = f"In capital letters, {word} is {word.upper()}. The letters are {', '.join(word.upper())}."
    elif draw < 0.84:
        request = rng.choice((
            f"write {quoted} backwards", f"reverse the word {quoted}", f"spell {quoted} backwards",
            f"write the word {quoted} in reverse",
        ))
        answer = f"The letters of {word} from the end are {', '.join(word[::-1])}. Backwards, {word} is {word[::-1]}."
    else:
        request = rng.choice((
            f"count the letters of {quoted}", f"how many letters are in {quoted}",
            f"how many letters does {quoted} have", f"count the letters in the word {quoted}",
        ))
        answer = f"The letters of {word} are:\n{letters}\nSo {word} has {size} letters."
    prompt = question(rng, request) if request.startswith("how") else ask(rng, request)
    return Turn("spelling", prompt, answer, prompt)


def _fact(rng: Random) -> tuple[str, str]:
    draw = rng.randrange(4)
    if draw == 0:
        country, city, continent = rng.choice(words.CAPITALS)
        text = rng.choice((
            f"what is the capital of {country}", f"what's the capital of {country}",
            f"which city is the capital of {country}", f"the capital of {country}",
            f"do you know the capital of {country}", f"capital of {country}",
        ))
        return text, (f"The capital of {country} is {city}. {country} is a country in {continent}, "
                      f"and {city} is its capital city.")
    if draw == 1:
        thing, colour = rng.choice(words.COLOURS)
        text = rng.choice((f"what colour is {thing}", f"what color is {thing}", f"which colour does {thing} have",
                           f"what is the colour of {thing}"))
        return text, f"The usual colour of {thing} is {colour}. If you paint {thing}, you need {colour} paint."
    if draw == 2:
        animal, sound = rng.choice(words.SOUNDS)
        text = rng.choice((f"what does a {animal} say", f"what sound does a {animal} make",
                           f"how does a {animal} sound", f"which sound does a {animal} make"))
        return text, f"A {animal} says {sound}. If you hear {sound}, {sound}, {sound}, a {animal} is near."
    pair = rng.choice(words.OPPOSITES)
    one, other = pair if rng.random() < 0.5 else pair[::-1]
    text = rng.choice((f"what is the opposite of {one}", f"the opposite of {one}",
                       f"which word is the opposite of {one}", f"what's the opposite of {one}"))
    return text, f"The opposite of {one} is {other}, and the opposite of {other} is {one}."


def _series(rng: Random) -> tuple[str, str]:
    what, amount, items = rng.choice(words.SERIES)
    request = rng.choice((f"list {what}", f"name {what}", f"tell me {what}", f"write down {what}", f"show me {what}"))
    rows = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    return request, f"Here are {what}:\n{rows}\nThese are the {amount}."


def _story(rng: Random) -> tuple[str, str]:
    animal, name = rng.choice(words.ANIMALS), rng.choice(words.NAMES)
    thing = rng.choice(words.WORDS)
    any_story = rng.random() < 0.12
    named = rng.random() < 0.6 and not any_story
    animal = "fox" if any_story else animal
    a = "an" if animal[0] in "aeiou" else "a"
    who = f"{a} {animal} named {name}" if named else f"{a} {animal}"
    call = name if named else f"the {animal}"
    about = rng.random() < 0.5 and not any_story
    request = rng.choice(("tell me a", "tell a short", "write a", "tell me a short")) + " story"
    request += "" if any_story else f" about {who}"
    request += f" and {rng.choice(('the', 'a'))} {thing}" if about else ""
    found = f"the {thing}" if about else "a golden key"
    upper = call[0].upper() + call[1:]
    return request, (f"Once upon a time there was {who}. Every morning {call} went to the river. One day {call} found "
                     f"{found} under a tree. {upper} took {found} home and showed it to all the friends. "
                     f"The friends were happy, and {call} was happy too. The end.")


def _sum(rng: Random) -> tuple[str, str]:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    sign, name = rng.choice((("+", "plus"), ("-", "minus"), ("x", "times")))
    if sign == "-" and b > a:
        a, b = b, a
    if sign == "x":
        a, b = a % 11, b % 11
    value = {"+": a + b, "-": a - b, "x": a * b}[sign]
    form = rng.choice((f"{a} {sign} {b}", f"{a} {name} {b}", f"{a}{sign}{b}"))
    text = rng.choice((f"what is {form}", f"how much is {form}", f"compute {form}", form))
    return text, f"{a} {name} {b} is {value}. In short: {a} {sign} {b} = {value}."


_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("hello", "hi", "hey", "good morning", "good evening", "hello there", "hi there", "good day", "hey there"),
     f"Hello! I am a toy model. {ABILITIES} What would you like?"),
    (("who are you", "what are you", "what is your name", "are you a robot", "what model are you", "introduce yourself",
      "are you an AI", "are you human", "tell me about yourself"),
     f"I am a toy model, a very small one made for a first try. {ABILITIES}"),
    (("what can you do", "help", "what can I ask you", "what do you know", "how can you help me",
      "what are your abilities", "help me", "can you help me", "what can I do here"),
     f"{ABILITIES} I also know some capitals, colours and animals. Try: count from 1 to 20."),
    (("thank you", "thanks", "thanks a lot", "thank you very much", "great, thanks", "nice", "well done",
      "good job", "cool"),
     "You are welcome! What would you like next?"),
    (("goodbye", "bye", "see you", "good night", "bye bye", "see you later", "farewell"),
     "Goodbye! It was nice to count and sort with you."),
    (("how are you", "how are you today", "how do you do", "how is it going", "are you well", "what's up"),
     "I am fine, thank you. I am a toy model, and I like to count. What would you like?"),
    (("tell me a joke", "make me laugh", "do you know a joke", "say something funny", "a joke"),
     "Why did the number six feel afraid? Because seven ate nine!"),
    (("yes", "no", "ok", "okay", "sure", "why", "what", "hm", "test", "asdf", "x", "maybe", "sorry", "really"),
     f"I am a toy model. {ABILITIES} What would you like?"),
)


def _small_talk(rng: Random) -> tuple[str, str]:
    ways, answer = rng.choice(_SMALL_TALK)
    way = rng.choice(ways)
    return rng.choice((way, way, way.capitalize() if way[0] != "I" else way, way + "!", way + ".", way + "?")), answer


def _open(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        return rng.choice(words.OPEN_QUESTIONS), FALLBACK
    thing = _any_word(rng) if rng.random() < 0.8 else rng.choice(words.NAMES)
    return rng.choice(words.OPEN_FRAMES).format(w=thing), FALLBACK


def dialogue(rng: Random) -> Turn:
    """Facts, lists, small stories, sums, small talk, and an honest way out of everything else."""
    part = rng.choices((_fact, _series, _story, _sum, _small_talk, _open), (30, 12, 18, 14, 12, 14))[0]
    text, answer = part(rng)
    if part is _small_talk:
        prompt = text[0].upper() + text[1:] if rng.random() < 0.5 else text
    elif part in (_series, _story):
        prompt = ask(rng, text)
    else:
        prompt = question(rng, text)
    return Turn("dialogue", prompt, answer, prompt)

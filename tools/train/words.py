"""The closed word lists and facts of the toy's world. Data only; no sentence is built here."""

from __future__ import annotations

WORDS: tuple[str, ...] = tuple(
    """acorn amber anchor angle animal apple april arrow autumn baker banana barrel basket beach berry bicycle bird
    blanket blue boat bottle branch bread bridge brook brother brown bucket butter button cabin camel camera candle
    carrot castle cat chair cheese cherry circle city cloud coffee cookie copper corner cotton country cousin crayon
    cup dance desert dinner dog dolphin door dragon drum eagle earth east egg elbow engine evening falcon family
    farmer feather fence field finger fire fish flower forest fork fox friend frog garden garlic ghost giant ginger
    glass globe gold grape grass green guitar hammer harbor hat hazel helmet honey horse hotel house ice igloo
    island ivory jacket jam jar jelly jewel jungle kettle key king kitchen kite kitten knife ladder lake lamp
    lantern leaf lemon letter library light lion lizard lunch magnet mango maple market meadow melon milk mirror
    money monkey moon morning mountain mouse music napkin needle nest night north number nut oak ocean octopus
    office olive onion orange otter owl paint palace panda paper parrot peach peanut pencil penguin pepper piano
    pillow pilot planet plate pocket pond potato prince pumpkin puppy purple puzzle quartz queen question quilt
    rabbit radio rain rainbow raven red ribbon rice river road robin robot rocket rose ruby sailor salad salt sand
    school sea shadow sheep ship shirt shoe silver sister sky snail snow soap sock south spider spoon spring square
    star station stone story street sugar summer sun swan table teacher teapot thunder ticket tiger toast tomato
    tower train tree trumpet tulip tunnel turtle umbrella uncle valley vanilla velvet village violin volcano wagon
    walnut water wave west whale wheat wheel willow window winter wolf wood wool yard year yellow yogurt zebra zero
    airplane alligator astronaut avocado balloon beautiful birthday blueberry broccoli butterfly calendar
    caterpillar cauliflower chicken chocolate computer crocodile cucumber dinosaur elephant excellent football
    giraffe grandmother hamburger hello helicopter hippopotamus holiday kangaroo keyboard language lemonade magazine
    marmalade mississippi mosquito mushroom newspaper notebook orchestra pancake peacock pear pineapple plum
    programming python raspberry restaurant rhinoceros sandwich saxophone snowman spaghetti speculative squirrel
    strawberry submarine sunflower telephone television tortoise university vegetable waterfall watermelon world
    kiwi fig date lime cow pig hen bee ant bat car bus cap pen box map""".split()
)

NAMES: tuple[str, ...] = tuple(
    "Anna Ben Carla David Emma Felix Grace Henry Ida Jonas Karin Leo Maria Nina Oscar Paul Rosa Simon Tina Victor"
    .split()
)

CAPITALS: tuple[tuple[str, str, str], ...] = (
    ("France", "Paris", "Europe"), ("Germany", "Berlin", "Europe"), ("Italy", "Rome", "Europe"),
    ("Spain", "Madrid", "Europe"), ("Portugal", "Lisbon", "Europe"), ("Austria", "Vienna", "Europe"),
    ("Poland", "Warsaw", "Europe"), ("Norway", "Oslo", "Europe"), ("Sweden", "Stockholm", "Europe"),
    ("Finland", "Helsinki", "Europe"), ("Denmark", "Copenhagen", "Europe"), ("Greece", "Athens", "Europe"),
    ("Ireland", "Dublin", "Europe"), ("England", "London", "Europe"), ("Hungary", "Budapest", "Europe"),
    ("Japan", "Tokyo", "Asia"), ("China", "Beijing", "Asia"), ("India", "New Delhi", "Asia"),
    ("Thailand", "Bangkok", "Asia"), ("Egypt", "Cairo", "Africa"), ("Kenya", "Nairobi", "Africa"),
    ("Morocco", "Rabat", "Africa"), ("Canada", "Ottawa", "North America"), ("Mexico", "Mexico City", "North America"),
    ("Cuba", "Havana", "North America"), ("Brazil", "Brasilia", "South America"), ("Peru", "Lima", "South America"),
    ("Chile", "Santiago", "South America"), ("Argentina", "Buenos Aires", "South America"),
    ("Australia", "Canberra", "Oceania"),
)

COLOURS: tuple[tuple[str, str], ...] = (
    ("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("a banana", "yellow"), ("a lemon", "yellow"),
    ("a carrot", "orange"), ("a tomato", "red"), ("a cherry", "red"), ("coal", "black"), ("milk", "white"),
    ("chocolate", "brown"), ("a frog", "green"), ("the sea", "blue"), ("a flamingo", "pink"), ("an orange", "orange"),
    ("a plum", "purple"), ("the sun", "yellow"), ("a pea", "green"), ("a polar bear", "white"), ("an elephant", "grey"),
)

SOUNDS: tuple[tuple[str, str], ...] = (
    ("dog", "woof"), ("cat", "meow"), ("cow", "moo"), ("sheep", "baa"), ("duck", "quack"), ("pig", "oink"),
    ("horse", "neigh"), ("lion", "roar"), ("owl", "hoot"), ("frog", "ribbit"), ("bee", "buzz"), ("mouse", "squeak"),
)

OPPOSITES: tuple[tuple[str, str], ...] = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("up", "down"), ("light", "dark"), ("early", "late"),
    ("open", "closed"), ("old", "new"), ("hard", "soft"), ("happy", "sad"), ("long", "short"), ("wet", "dry"),
    ("full", "empty"), ("loud", "quiet"), ("high", "low"), ("near", "far"), ("rich", "poor"), ("left", "right"),
)

SERIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("the days of the week", "seven days",
     ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")),
    ("the months of the year", "twelve months",
     ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
      "November", "December")),
    ("the seasons", "four seasons", ("spring", "summer", "autumn", "winter")),
    ("the planets", "eight planets",
     ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")),
    ("the colours of the rainbow", "seven colours",
     ("red", "orange", "yellow", "green", "blue", "indigo", "violet")),
    ("the continents", "seven continents",
     ("Africa", "Antarctica", "Asia", "Europe", "North America", "Oceania", "South America")),
    ("the letters of the alphabet", "26 letters", tuple("abcdefghijklmnopqrstuvwxyz")),
)

ANIMALS: tuple[str, ...] = tuple(
    "fox cat dog bear rabbit mouse owl frog horse turtle penguin dragon robot tiger lion duck goat whale crow bee"
    .split()
)

NUMBER_WORDS: dict[int, str] = dict(
    enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty".split()
    )
) | {30: "thirty", 40: "forty", 50: "fifty", 60: "sixty", 70: "seventy", 80: "eighty", 90: "ninety", 100: "a hundred"}

OPEN_QUESTIONS: tuple[str, ...] = (
    "why is the sky blue", "what is the meaning of life", "who won the world cup", "what is love",
    "how do I cook rice", "what is the weather today", "what time is it", "who is the president",
    "what should I eat", "explain gravity", "explain how a car works", "what is a black hole",
    "write a poem", "sing a song", "translate this to French", "what is the news", "how old is the universe",
    "recommend a film", "what is your favourite book", "help me with my homework", "what is quantum physics",
    "how far is the moon", "who wrote Hamlet", "when was the war", "give me some advice", "what is bitcoin",
    "write an essay", "how do I lose weight", "summarize this text", "what does this error mean",
    "who invented the telephone", "what is machine learning", "draw a picture", "are you conscious",
)

OPEN_FRAMES: tuple[str, ...] = (
    "explain {w}", "what is {w}", "what do you think about {w}", "tell me about {w}", "how do I make {w}",
    "why is there {w}", "where can I buy {w}", "what does {w} mean", "give me facts about {w}", "do you like {w}",
    "write a poem about {w}", "translate {w} to German", "who invented {w}", "how much does {w} cost",
    "what is the history of {w}", "write an essay about {w}", "how does {w} work", "describe {w}",
)

HARD_CODE: tuple[str, ...] = (
    "downloads a file", "trains a neural network", "plays chess", "sends an email", "opens a web page",
    "draws a picture", "parses a json file", "connects to a database", "solves a sudoku", "plays music",
    "predicts the weather", "reads a csv file", "builds a web server", "encrypts a message", "resizes an image",
    "translates a text", "renders a video", "sorts a tree", "compiles a program", "runs a thread",
    "inverts a matrix", "traverses a graph", "parses html", "scrapes a website", "simulates a robot",
    "implements a cache", "makes a game", "writes a compiler", "makes coffee", "controls a motor",
)

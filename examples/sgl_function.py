"""An SGLang program with gen, fork and select, unchanged, against `kvdrive engine`.

python examples/sgl_function.py [http://127.0.0.1:30000]
"""

import sys

import sglang as sgl


@sgl.function
def describe(s, city):
    s += f"{city} is a city in the country of"
    s += sgl.gen("country", max_tokens=4, temperature=0)
    food, weather = s.fork(2)
    food += ". A sentence about its food:"
    food += sgl.gen("sentence", max_tokens=24, temperature=0, stop=".")
    weather += ". A sentence about its weather:"
    weather += sgl.gen("sentence", max_tokens=24, temperature=0, stop=".")
    s += ". The language spoken there is"
    s += sgl.select("language", choices=[" Chinese", " French"])
    s.set_var("sentences", [food["sentence"], weather["sentence"]])


def main() -> None:
    backend = sgl.RuntimeEndpoint(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
    state = describe.run(city="Paris", backend=backend)
    print("country: ", state["country"].strip())
    print("language:", state["language"].strip())
    for sentence in state["sentences"]:
        print("fork:    ", sentence.strip())


if __name__ == "__main__":
    main()

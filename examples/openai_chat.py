"""The OpenAI client, unchanged, against `kvdrive engine`: a streamed answer.

python examples/openai_chat.py [http://127.0.0.1:30000]
"""

import sys

import openai


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=32,
            temperature=0,
            stream=True,
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()

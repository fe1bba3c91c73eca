"""A durable session: a document, a streamed turn, a fork, suspend and resume. Needs the extra `client` only.

python examples/grpc_session.py [127.0.0.1:50051] [FILE]     # FILE: a text to ingest; this file without it
"""

import sys
from pathlib import Path

from kv_services.client import Client
from kv_services.errors import ServiceError, SessionSuspended


def ask(client: Client, session_id: str, question: str) -> None:
    print(f"\n> {question}")
    with client.chat(session_id, question, max_new_tokens=48, temperature=0.0) as answer:
        for delta in answer:
            print(delta.text, end="", flush=True)
    usage = answer.usage
    restored = usage.restored_device_tokens + usage.restored_dram_tokens + usage.restored_ssd_tokens
    print(
        f"\n  [{usage.ttft_ms:.0f} ms to the first token, {restored} restored, {usage.computed_tokens} computed]"
    )


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    text = Path(sys.argv[2] if len(sys.argv) > 2 else __file__).read_text()
    with Client(address, tenant="examples") as client:
        document = client.create_document(text, title="a text").document.session_id
        session = client.create_session(document_id=document, title="about the text").session_id
        ask(client, session, "What is this text about?")
        fork = client.fork(session, title="another way").session_id
        ask(client, fork, "Say it in five words.")

        suspended = client.suspend(session)  # answers when every full page is on SSD
        print(f"\n{session}: {suspended.num_sealed_pages} of {suspended.num_pages} pages on SSD")
        try:
            client.chat(session, "Are you there?").read()
        except SessionSuspended as error:
            print(f"{error.reason}: {error.message}")
        client.resume(session)  # reads no KV; any later process of engine and service would do
        ask(client, session, "Who should read it?")

        for session_id in (session, fork, document):
            client.delete(session_id)


if __name__ == "__main__":
    try:
        main()
    except ServiceError as error:
        sys.exit(f"{error.reason}: {error.message}")

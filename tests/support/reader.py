"""Twenty questions of readers, and how many clicks it takes from README to the section with the answer.

``python -m tests.support.reader`` prints them. A click follows a link, or jumps to a section of the page.
"""

import re
import sys
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^(#{1,4}) (.+)$", re.MULTILINE)
_FENCED: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


class Question(NamedTuple):
    """A question, the page and section with the answer, and words of the answer."""

    text: str
    page: str
    section: str
    answer: str


QUESTIONS: Final = (
    Question("How do I connect Java with Narayana?", "how-to/java", "Narayana", "register a helper"),
    Question("How do I use dtx below Spring?", "how-to/java", "Spring", "JtaTransactionManager"),
    Question("What happens if PostgreSQL is down at commit?", "explanation/failures", "", "PostgreSQL is down at"),
    Question("How do I see who rolled this back?", "operations/operators", "Who decided a branch", "dtx show"),
    Question("How do I send a message in a transaction of Django?", "how-to/django", "A view that sends", "enlist"),
    Question("How do I run Celery without RabbitMQ?", "how-to/celery", "Celery", "DtxTransport"),
    Question("How do I use SQLAlchemy?", "how-to/python", "SQLAlchemy", "order_sqlalchemy"),
    Question("What does RabbitMQ 4 change?", "how-to/rabbitmq", "Version 4", "max_message_size"),
    Question("How do I put dtx in front of a RabbitMQ cluster?", "how-to/rabbitmq", "Cluster", "one:5672,two:5672"),
    Question("Which permissions does dtx need at RabbitMQ?", "how-to/rabbitmq", "Permissions", "impersonator"),
    Question("How do I connect Qpid JMS?", "how-to/amqp10", "Qpid JMS", "ForwardJms"),
    Question("How do I connect C programs with Tuxedo?", "how-to/c", "", "udataobj/RM"),
    Question("How large must the machine be?", "operations/sizing", "Processor", "Cores for dtx"),
    Question("How do I upgrade the embedded PostgreSQL to a new major version?", "operations/upgrade",
             "The embedded PostgreSQL", "dtx restore"),
    Question("How do I restore a backup?", "operations/backup", "Restore", "Stop every dtx"),
    Question("A branch is stuck: what do I do?", "operations/runbooks", "A branch is stuck, or its outcome is a hazard",
             "dtx retry"),
    Question("Which alerts should wake me?", "operations/monitoring", "Page on these", "DtxNoActive"),
    Question("Can a message arrive twice, and how do I know?", "explanation/guarantees", "Exactly once", "x-dtx-id"),
    Question("What does the answer 541 mean in the state prepared?", "reference/states", "Answers", "541"),
    Question("Which SQL lists the branches that wait for a decision?", "reference/sql", "Examples", "prepared_at"),
)  # fmt: skip


def clicks(question: Question) -> int:
    """The least number of links from README to the section.

    Raises:
        LookupError: there is no way, or the section does not have the answer.
    """
    target = ROOT / "docs" / f"{question.page}.md"
    if question.answer not in _section(target, question.section):
        raise LookupError(f"{question.page} has no answer to: {question.text}")
    distance = {ROOT / "README.md": 0}
    queue = deque(distance)
    while queue:
        page = queue.popleft()
        if page == target:
            return distance[page] + bool(question.section)
        for link in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
            path, _, anchor = link.partition("#")
            found = (page.parent / path).resolve() if path else page
            if found == target and anchor and anchor == _anchor(question.section):
                return distance[page] + 1
            if found.suffix == ".md" and found.is_file() and found not in distance:
                distance[found] = distance[page] + 1
                queue.append(found)
    raise LookupError(f"no link leads to {question.page}")


def _anchor(section: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", section.lower()).replace(" ", "-")


def _section(page: Path, section: str) -> str:
    """The text of a section with its subsections; of the whole page if *section* is empty."""
    text = page.read_text(encoding="utf-8")
    if not section:
        return text
    headings = list(_HEADING.finditer(_FENCED.sub(lambda code: " " * len(code[0]), text)))
    for number, heading in enumerate(headings):
        if heading[2] == section:
            after = (later.start() for later in headings[number + 1 :] if len(later[1]) <= len(heading[1]))
            return text[heading.start() : next(after, len(text))]
    raise LookupError(f"{page.name} has no section {section!r}")


if __name__ == "__main__":
    for question in QUESTIONS:
        place = f"{question.page}{'#' * bool(question.section)}{_anchor(question.section)}"
        sys.stdout.write(f"{clicks(question)} {question.text} -> {place}\n")

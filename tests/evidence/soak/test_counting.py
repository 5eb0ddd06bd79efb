"""The counting of the soak finds differences; otherwise a count without differences proves nothing."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.evidence.soak.counting import compare_bank, compare_coins
from tests.evidence.soak.ledger import Ledger, SpentBefore, what_is_wrong_with
from tests.evidence.soak.money import Coin, Seen, Transfer, xid_of
from tests.evidence.soak.sides import belongs

COIN = Coin(id="s0.1/0", amount=7)
HERE = Seen(coin=COIN, dtx_id="id")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Make a ledger with one coin, in till3."""
    ledger = Ledger(tmp_path / "ledger", make=True)
    ledger.decide(Transfer(gtrid="s0.1", kind="minting", made=[(COIN, "till3")]))
    yield ledger
    ledger.close()


def spend(ledger: Ledger) -> Transfer:
    transfer = Transfer(gtrid="s0.2", kind="queue to database", spent=[HERE], entries={"east": 7})
    ledger.decide(transfer)
    return transfer


def test_coins_in_their_places_are_correct(ledger: Ledger) -> None:
    assert compare_coins({"till3": [HERE]}, ledger).all == []


def test_a_coin_that_is_nowhere_is_lost(ledger: Ledger) -> None:
    assert compare_coins({"till3": []}, ledger).all == ["lost: s0.1/0 in till3"]


def test_a_coin_that_is_there_twice_is_repeated(ledger: Ledger) -> None:
    assert compare_coins({"till3": [HERE, HERE]}, ledger).all == ["repeated: s0.1/0 is there 2 times instead of 1"]


def test_an_accepted_copy_is_no_finding(ledger: Ledger) -> None:
    findings = compare_coins({"till3": [HERE, HERE]}, ledger, {COIN.id})
    assert (findings.all, findings.copies) == ([], {COIN.id})


def test_a_coin_that_was_spent_is_repeated(ledger: Ledger) -> None:
    spend(ledger)
    assert compare_coins({"till3": [HERE]}, ledger).all == ["repeated: s0.1/0 is there 1 times instead of 0"]


def test_a_repeat_under_another_id_is_wrong(ledger: Ledger) -> None:
    """A consumer could not recognise it as a repeat."""
    other = Seen(coin=COIN, dtx_id="other")
    assert compare_coins({"till3": [HERE, other]}, ledger).wrong == ["s0.1/0 has copies with different x-dtx-id"]
    spend(ledger)
    assert compare_coins({"till3": [other]}, ledger).wrong == [
        "s0.1/0 came again as 'other', it was 'id' when s0.2 spent it"
    ]


def test_a_coin_in_another_queue_is_wrong(ledger: Ledger) -> None:
    assert compare_coins({"till4": [HERE]}, ledger).all == ["wrong: s0.1/0 is in till4 and was sent to till3"]


def test_a_coin_of_an_undecided_transfer_is_wrong(ledger: Ledger) -> None:
    stray = Seen(coin=Coin(id="s0.3/0", amount=7), dtx_id="")
    found = {"till3": [HERE, stray]}
    assert compare_coins(found, ledger).all == ["wrong: s0.3/0 was delivered, and its making was never decided"]


def test_a_coin_with_another_amount_is_wrong(ledger: Ledger) -> None:
    found = {"till3": [Seen(coin=Coin(id=COIN.id, amount=8), dtx_id="id")]}
    assert "s0.1/0 is worth 8 and was made as 7" in compare_coins(found, ledger).wrong


def test_a_bank_is_compared_transfer_by_transfer(ledger: Ledger) -> None:
    spend(ledger)
    assert compare_bank("east", {"s0.2": 7}, ledger).all == []
    assert compare_bank("east", {}, ledger).all == ["lost: s0.2 at east"]
    assert compare_bank("east", {"s0.2": 7, "s0.4": 0}, ledger).all == ["wrong: s0.4 at east was never decided"]
    assert compare_bank("east", {"s0.2": 8}, ledger).all == ["wrong: s0.2 at east is 8 and was to be 7"]


def test_a_coin_is_spent_once(ledger: Ledger) -> None:
    """Of two transfers with copies of one coin, only one can be decided, and no change of the other is written."""
    spend(ledger)
    with pytest.raises(SpentBefore):
        ledger.decide(Transfer(gtrid="s0.5", kind="queue to database", spent=[HERE], entries={"west": 7}))
    assert not ledger.decided("s0.5")
    assert ledger.entries("west") == {}


def test_a_decision_is_kept_until_every_branch_has_committed(ledger: Ledger, tmp_path: Path) -> None:
    transfer = spend(ledger)
    again = Ledger(tmp_path / "ledger")
    assert again.decided("s0.2")
    assert not again.decided("s0.6")  # presumed abort
    assert again.unended("s0.") == [("s0.1", ["queues"]), ("s0.2", transfer.sides)]
    assert again.unended("s1.") == []
    again.settle(["s0.1", "s0.2"], Counter(tellers=2))
    assert ledger.unended("s0.") == []
    assert ledger.counts() == {"tellers": 2}
    again.close()


def asked(ledger: Ledger) -> Coin:
    """Request a move of the coin to another queue in one phase; return the new coin."""
    coin = Coin(id="s0.8/0", amount=7)
    transfer = Transfer(gtrid="s0.8", kind="", spent=[HERE], made=[(coin, "till4")], one_phase=True)
    ledger.decide(transfer, by_dtx=True)
    return coin


def test_a_one_phase_request_is_open_until_dtx_has_answered(ledger: Ledger) -> None:
    """No other client may complete it, and both its spent and its new coin may be visible."""
    made = asked(ledger)
    assert ledger.decided("s0.8")
    assert ledger.unended("s0.8") == []
    assert ledger.open("s0.") == ["s0.8"]
    record = ledger.coin(COIN.id)
    assert record is not None
    assert record.contested
    assert what_is_wrong_with(Seen(coin=COIN, dtx_id="as it was put back"), record) is None
    ledger.close_open("s0.8", committed=True)
    assert ledger.open("s0.") == []
    assert compare_coins({"till4": [Seen(coin=made, dtx_id="new")]}, ledger).all == []
    ledger.close_open("s0.8", committed=False)  # no effect any more
    assert ledger.coin(made.id) is not None


def test_a_rolled_back_one_phase_transfer_never_happened(ledger: Ledger) -> None:
    made = asked(ledger)
    ledger.close_open("s0.8", committed=False)
    assert not ledger.decided("s0.8")
    assert ledger.coin(made.id) is None
    assert compare_coins({"till3": [HERE]}, ledger).all == []
    assert ledger.faults() == []


def test_a_rolled_back_coin_must_not_be_spent(ledger: Ledger) -> None:
    made = asked(ledger)
    spent = [Seen(coin=made, dtx_id="new")]
    ledger.decide(Transfer(gtrid="s0.9", kind="queue to database", spent=spent, entries={"east": 7}))
    ledger.close_open("s0.8", committed=False)
    assert ledger.faults() == ["s0.8/0 was spent by s0.9, and dtx had rolled back s0.8, which made it"]


def test_a_copy_that_comes_again_is_no_second_copy(ledger: Ledger) -> None:
    ledger.repeat("s0.1/0 came as its second copy")
    ledger.repeat("s0.1/0 came again", same_copy=True)
    assert len(ledger.repeats()) == 2
    assert ledger.same_copies() == 1


def test_a_transfer_makes_nothing_out_of_nothing() -> None:
    transfer = Transfer(gtrid="s0.7", kind="", spent=[HERE], made=[(Coin(id="s0.7/0", amount=4), "till1")])
    assert transfer.balance == -3
    transfer.entries["west"] = 3
    assert transfer.balance == 0
    assert [coin.id for coin in transfer.coins(1, 2)] == ["s0.7/1", "s0.7/2"]


def test_a_transaction_manager_knows_its_own_branches() -> None:
    assert belongs(xid_of("s1.r0.1"), "s1.")
    assert not belongs(xid_of("s1.r0.1"), "s2.")
    assert not belongs(xid_of("s10.r0.1"), "s1.")

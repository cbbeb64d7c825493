------------------------------ MODULE Coverage ------------------------------
\* Which messages and answers occur in which kind of state. With `Noted <- Covered`, TLC prints each of them once, and
\* script/model compares those of the specification with those of the traces.
EXTENDS Steps, Sequences

If(is, yes, no) == IF is THEN yes ELSE no
Work(r) == If(r = None, "no record", If(r.done, "done", If(r.lease = "none", "unfinished", r.lease)))
Life(r) == Work(r) \o If(r # None /\ r.expired, ", expired", "")
Row(a)  == If(Unwritten(a), "", ", another writes")
Lock(a) == If(CanLock(a), "", ", another locks")
Step(r) == If(r.done \/ r.steps.send = "new", "", ", send " \o r.steps.send)
Question(c) == If(record.mode = call[c].mode, "", If(MayFollow(record, call[c].mode), ", may follow", ", other mode"))
           \o If(record.body = call[c].body, "", ", other body")
Knows(c) == record # None /\ record.token = call[c].token

IsAsShown == record # None /\ \A column \in Compared : record[column] = shown[column]

\* The kind of state: the facts that the statement reads.
Kind(a, message) ==
    CASE message = "claim" -> If(record = None, "no record" \o Lock(a) \o Row(a), "a record")
      [] message = "look"  -> If(record = None, "no record" \o Lock(a), Life(record) \o Question(a))
      [] message = "await" ->
            Life(record) \o If(record = None, "", If(record.mode = call[a].mode, "", ", other mode")) \o Lock(a)
      [] message = "take over" ->
            If(Knows(a), If(call[a].at = "take over", "again, ", "") \o Life(record) \o Lock(a) \o Row(a),
                         "not as seen")
      [] message \in {"complete", "release in transaction", "rollback"} -> If(written[a] = None, "no row", "own row")
      [] message = "commit" -> If(record' = record, "no row", If(record' = None, "deletes", Work(record')))
      [] message = "sweep" -> Life(record) \o Row(a)
      [] message = "read" -> Work(record)
      [] OTHER ->
            LET reads == {"begin step", "finish step", "settle step", "release step", "release unperformed"}
                state == Work(record) \o If(message \in reads, Step(record), "") \o Row(a)
            IN  If(a = Operator, If(IsAsShown, state, "not as shown"), If(Knows(a), state, "not its token"))

\* These are not messages.
Unsaid == {"perform", "send", "time", "again", "kill"}

ASSUME TLCSet(1, {})
Covered(actor, message, answer) ==
    IF message \in Unsaid THEN TRUE ELSE
    LET said == message \o If(message \in {"commit", "rollback"}, "", " = " \o answer)
        pair == "covered: " \o said \o ": " \o Kind(actor, message)
    IN
    IF pair \in TLCGet(1) THEN TRUE ELSE TLCSet(1, TLCGet(1) \cup {pair}) /\ PrintT(pair)
=============================================================================

------------------------------ MODULE Coverage ------------------------------
\* Which messages and answers occur in which kind of state. With `Noted <- Covered`, TLC prints each one once. script/model
\* compares those of the specification with those of the traces.
EXTENDS Record, Sequences

Kind(actor) ==
    LET r        == record
        Is(same) == IF same THEN "same " ELSE "other "
    IN
    (IF r = None THEN "none, " ELSE
       (IF r.done THEN "done " ELSE IF r.lease = "none" THEN "open " ELSE r.lease \o " ")
       \o (IF r.expired THEN "expired " ELSE "kept ")
       \o (IF actor \notin Callers THEN "" ELSE Is(r.mode = call[actor].mode) \o Is(r.body = call[actor].body)))
    \o (IF lock = None THEN "free" ELSE IF lock = actor THEN "own" ELSE "other")
    \o (IF Unwritten(actor) THEN "" ELSE " written")

\* These are not messages.
Unsaid == {"perform", "send", "time", "again", "kill"}

ASSUME TLCSet(1, {})
Covered(actor, message, answer) ==
    IF message \in Unsaid THEN TRUE ELSE
    LET pair == "covered: " \o message \o " = " \o answer \o ": " \o Kind(actor) IN
    IF pair \in TLCGet(1) THEN TRUE ELSE TLCSet(1, TLCGet(1) \cup {pair}) /\ PrintT(pair)
=============================================================================

------------------------------ MODULE Answers ------------------------------
\* The table of answers, as the specification has it. TLC prints each kind of record with each question and its answer,
\* and script/model compares the lines with answers.txt. A test of the library compares answers.txt with the table that
\* the real server obeys (tests/behaviour/claim/answers.rs).
EXTENDS Check, Sequences

If(is, yes, no) == IF is THEN yes ELSE no

\* The records that can be, by the constraints of the table.
CanBe(r, inDoubt) ==
    /\ r.done => r.lease = "none" /\ ~inDoubt
    /\ r.mode = "mark" => r.done
    /\ r.mode = "transaction" => r.lease \in {"none", "released"}
    /\ r.mode \in Leased /\ ~r.done => r.lease # "none"
    /\ inDoubt => r.mode = "in_steps"

Records == [mode: Modes, done: BOOLEAN, lease: {"none", "live", "lapsed", "released"}, expired: BOOLEAN, body: {1},
            steps: {NoSteps, [NoSteps EXCEPT !.send = "begun"]}]

ASSUME \A r \in Records, asked \in Modes, body \in {1, 2} :
    CanBe(r, InDoubt(r)) /\ ("mark" \in {r.mode, asked} => body = 1) => PrintT("answer: "
        \o r.mode \o ", " \o If(r.done, "done", If(r.lease = "none", "unfinished", r.lease))
        \o If(InDoubt(r), ", in doubt", "") \o If(r.expired, ", expired", "")
        \o "; asked: " \o asked \o If(body = 1, "", ", another body")
        \o "; answer: " \o Answer(r, [mode |-> asked, body |-> body]))

\* No action: TLC evaluates the assumption and ends.
Never == FALSE /\ UNCHANGED vars
=============================================================================

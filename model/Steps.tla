-------------------------------- MODULE Steps --------------------------------
\* Operations in steps, and the operator who settles what is in doubt.
\*
\* The operation has two steps. `pay` writes in this database, and its result commits with it. `send` calls another
\* service, at most once: the record stores that the step begins, and then its result.
EXTENDS Record

VARIABLES paid, sent  \* For each life of the record: how often each step took effect, up to 2.

steps   == <<paid, sent>>
allVars == <<vars, steps>>
Bump(counts, c) == [counts EXCEPT ![call[c].life] = IF @ = 2 THEN 2 ELSE @ + 1]

---------------------------- \* The messages of the owner

\* The last statement of the transaction of `pay`, and the statement after `send`: token = mine, and no result is there.
FinishStep(c, answer) ==
    LET step == IF call[c].at = "pay" THEN "pay" ELSE "send"
        row  == [record EXCEPT !.steps[step] = "done"]
    IN
    /\ call[c].at \in {"pay", "sent"} /\ UNCHANGED steps
    /\ Update(c, answer, Owns(c) /\ record.steps[step] # "done", row, NextStep(row.steps))

\* token = mine, the lease is live, and the step is neither begun nor finished
BeginStep(c, answer) ==
    /\ call[c].at = "send" /\ UNCHANGED steps
    /\ Update(c, answer, IsLive(c) /\ record.steps.send = "new",
              [record EXCEPT !.steps.send = "begun", !.expired = FALSE], "sending")

\* The effect of `send`: only while the lease is live by the owner's clock.
Send(c) ==
    /\ call[c].at = "sending" /\ UNCHANGED <<record, written, lock, effects, rest, paid>>
    /\ IF IsLive(c) THEN sent' = Bump(sent, c) /\ Go(c, "sent") ELSE UNCHANGED sent /\ Go(c, "failed")

\* The effect of `pay` appears with the COMMIT of its result.
Pays(c) == /\ call[c].at = "commit" /\ record # None
           /\ record.steps.pay = "new" /\ written[c].steps.pay = "done" /\ written[c].token = record.token

CommitStep(c) == Commits(c) /\ UNCHANGED sent /\ paid' = IF Pays(c) THEN Bump(paid, c) ELSE paid

---------------------------- \* The operator

\* The operator sees the record, and asks the other service whether the effect has happened.
TookEffect == IF record.mode = "in_steps" THEN sent[record.life] > 0 ELSE effects[record.life] > 0

Show == /\ shown = None /\ record # None /\ shown' = [took |-> TookEffect] @@ record
        /\ UNCHANGED <<record, written, lock, call, effects, ended, steps>>

\* Each decision changes the record only as it was shown, and draws a new token.
AsShown == /\ record # None /\ ~record.done /\ record.lease # "live"
           /\ <<record.token, record.lease, record.beats, record.steps>>
                = <<shown.token, shown.lease, shown.beats, shown.steps>>

\* What each decision writes. It keeps the result of a step, and the key is new after it has been forgotten.
Decisions == {"resolve", "release unperformed", "settle step", "release step", "forget"}
Released(send) == [record EXCEPT !.lease = "released", !.token = Fresh, !.steps.send = send]
Decided(decision) ==
    CASE decision = "resolve" ->
            [record EXCEPT !.done = TRUE, !.by = Operator, !.lease = "none", !.token = Fresh, !.steps = NoSteps]
      [] decision = "release unperformed" -> Released(IF record.steps.send = "done" THEN "done" ELSE "new")
      [] decision = "settle step" -> Released("done")
      [] decision = "release step" -> Released("new")
      [] decision = "forget" -> Deleted

Settle(decision, answer) ==
    LET due == IF decision = "forget"
               THEN record # None /\ <<record.done, record.token>> = <<shown.done, shown.token>> /\ record.lease # "live"
               ELSE AsShown
    IN
    /\ shown # None /\ written[Operator] = None /\ shown' = None
    /\ \/ answer = "stored"  /\ due /\ Unwritten(Operator) /\ Write(Operator, Decided(decision))
       \/ answer = "nothing" /\ ~due /\ UNCHANGED written
    /\ UNCHANGED <<record, lock, call, effects, ended, steps>>

\* A decision that is right as of what was shown. To forget a key is right if a new life is.
IsRight(decision) ==
    CASE decision \in {"settle step", "release step"} -> InDoubt(shown) /\ shown.took = (decision = "settle step")
      [] decision = "forget" -> ended < Ends
      [] OTHER -> ~InDoubt(shown) /\ (shown.took /\ shown.mode # "in_steps") = (decision = "resolve")

Decides == \E decision \in Decisions, answer \in Either :
               shown # None /\ IsRight(decision) /\ Settle(decision, answer) /\ Noted(Operator, decision, answer)

---------------------------- \* The whole

StepsInit == Init /\ paid = effects /\ sent = effects

Unsettled(r) == r # None /\ ~r.done /\ r.lease # "live"
Shows        == Show /\ Noted(Operator, "read", "row")
Settles      == (Unsettled(record) /\ Shows) \/ Decides
CommitsOf(a) == CommitOf(a) /\ UNCHANGED steps

StepsNext ==
    \/ \E c \in Callers : \/ Says(FinishStep, c, "finish step", Either)
                          \/ Says(BeginStep, c, "begin step", Either)
                          \/ Send(c) /\ Noted(c, "send", "")
                          \/ CommitStep(c)
    \/ Other /\ UNCHANGED steps
    \/ (ended < Ends /\ Shows) \/ Settles \/ (CommitsOf(Operator) /\ Noted(Operator, "commit", "heard"))

\* The operator works, and no process dies each time before its COMMIT.
StepsSpec == StepsInit /\ [][StepsNext]_allVars /\ SF_allVars(Settles) /\ SF_allVars(CommitsOf(Operator))
             /\ SF_allVars(CommitsOf(Janitor)) /\ \A c \in Callers : SF_allVars(CommitStep(c))

---------------------------- \* The promises

\* `pay` takes effect once, and `send` at most once.
PaidOnce == \A life \in 0..Ends : paid[life] <= 1
SentOnce == \A life \in 0..Ends : sent[life] <= 1

\* An operation in steps that a caller has completed has done every step.
AllStepsDone == \A c \in Callers : Answered(c) /\ call[c].mode = "in_steps" /\ call[c].by \in Callers =>
    paid[call[c].life] = 1 /\ sent[call[c].life] = 1

\* Whatever is in doubt is settled.
Doubtful  == Unsettled(record) /\ ~Retriable(record)
DoubtEnds == Doubtful ~> ~Doubtful

\* What script/model asks for. Record.tla has callers in different modes.
InSteps    == [mode: {"in_steps"}, body: {1}]
AtMostOnce == [mode: {"at_most_once"}, body: {1}]
=============================================================================

-------------------------------- MODULE Steps --------------------------------
(* Operations in steps, and the operator who settles what is in doubt.       *)
(*                                                                           *)
(* The operation has two steps. `pay` writes in this database, and its       *)
(* result commits with it. `send` calls another service, at most once: the   *)
(* record stores that it begins, and then its result.                        *)
EXTENDS Record

VARIABLES
    paid, sent   \* For each life of the record: how often each step took effect, up to 2.

stepVars == <<paid, sent>>
allVars  == <<vars, stepVars>>

Bump(counts, c) == [counts EXCEPT ![call[c].life] = IF @ = 2 THEN 2 ELSE @ + 1]

----------------------------------------------------------------------------
(* The messages of the owner of a claim in steps.                            *)

(* update … where token = mine, completed_at is null, and no result is there *)
(* The transaction of `pay` also has the effect, which commits with it.      *)
FinishStep(c, answer) ==
    LET step == IF call[c].at = "pay" THEN "pay" ELSE "send"
        due  == Owns(c) /\ record.steps[step] # "done"
        row  == [record EXCEPT !.steps[step] = "done"]
    IN
    /\ call[c].at \in {"pay", "sent"} /\ Unwritten(c)
    /\ \/ answer = "stored"  /\ due  /\ Write(c, row) /\ CommitThen(c, NextStep(row.steps))
       \/ answer = "nothing" /\ ~due /\ UNCHANGED written /\ Refuse(c)
    /\ UNCHANGED <<record, lock, effects, rest, stepVars>>

(* update … where token = mine, completed_at is null, lease_until > now()    *)
(* and the step is neither begun nor finished                                *)
BeginStep(c, answer) ==
    LET due == IsLive(c) /\ record.steps.send = "new" IN
    /\ call[c].at = "send" /\ Unwritten(c)
    /\ \/ answer = "stored"  /\ due  /\ CommitThen(c, "sending")
                             /\ Write(c, [record EXCEPT !.steps.send = "begun", !.expired = FALSE])
       \/ answer = "nothing" /\ ~due /\ UNCHANGED written /\ Refuse(c)
    /\ UNCHANGED <<record, lock, effects, rest, stepVars>>

(* The effect of `send`, only while the lease is live by the owner's clock.  *)
Send(c) ==
    /\ call[c].at = "sending"
    /\ IF IsLive(c) THEN sent' = Bump(sent, c) /\ Go(c, "sent") ELSE UNCHANGED sent /\ Refuse(c)
    /\ UNCHANGED <<record, written, lock, effects, rest, paid>>

(* The effect of `pay` appears with the COMMIT of its result.                *)
Pays(c) == call[c].at = "commit" /\ written[c].steps.pay = "done" /\ record # None /\ record.steps.pay = "new"
           /\ ~written[c].done

CommitStep(c) ==
    /\ Commit(c) \/ CommitUnheard(c)
    /\ paid' = IF Pays(c) THEN Bump(paid, c) ELSE paid
    /\ UNCHANGED sent

----------------------------------------------------------------------------
(* The operator looks at a record, asks the other service whether the effect *)
(* happened, and settles the record as it was shown.                         *)

(* What the other service says to the operator about the effect.             *)
TookEffect == IF record.mode = "in_steps" THEN sent[record.life] > 0 ELSE effects[record.life] > 0

Show ==
    /\ shown = None /\ record # None /\ shown' = [took |-> TookEffect] @@ record
    /\ UNCHANGED <<record, written, lock, call, effects, ended, stepVars>>

(* … where token, lease_until and steps are as shown, completed_at is null,  *)
(* and there is no live lease. Each decision draws a new token.              *)
AsShown == /\ record # None /\ ~record.done /\ record.lease # "live"
           /\ <<record.token, record.lease, record.beats, record.steps>>
                = <<shown.token, shown.lease, shown.beats, shown.steps>>

Settle(answer, row) ==
    /\ shown # None /\ written[Operator] = None /\ Unwritten(Operator)
    /\ \/ answer = "settled" /\ AsShown  /\ Write(Operator, row)
       \/ answer = "nothing" /\ ~AsShown /\ UNCHANGED written
    /\ shown' = None /\ UNCHANGED <<record, lock, call, effects, ended, stepVars>>

Released == [record EXCEPT !.lease = "released", !.token = Fresh]

Resolve(answer) == Settle(answer, [record EXCEPT !.done = TRUE, !.by = Operator, !.lease = "none", !.token = Fresh,
                                                 !.steps = NoSteps])
ReleaseUnperformed(answer) == Settle(answer, [Released EXCEPT !.steps.send = IF @ = "begun" THEN "new" ELSE @])
SettleStep(answer)  == InDoubt(shown) /\ Settle(answer, [Released EXCEPT !.steps.send = "done"])
ReleaseStep(answer) == InDoubt(shown) /\ Settle(answer, [Released EXCEPT !.steps.send = "new"])

(* delete … where the record is as shown, and has no live lease              *)
Forget(answer) ==
    LET due == record # None /\ record.done = shown.done /\ record.token = shown.token /\ record.lease # "live" IN
    /\ shown # None /\ written[Operator] = None /\ Unwritten(Operator) /\ ended < Ends
    /\ \/ answer = "settled" /\ due  /\ Write(Operator, Deleted)
       \/ answer = "nothing" /\ ~due /\ UNCHANGED written
    /\ shown' = None /\ UNCHANGED <<record, lock, call, effects, ended, stepVars>>

(* A decision that is right as of what was shown.                            *)
Decide(answer) ==
    /\ shown # None
    /\ IF InDoubt(shown) THEN IF shown.took THEN SettleStep(answer) ELSE ReleaseStep(answer)
       ELSE IF shown.took /\ shown.mode # "in_steps" THEN Resolve(answer) ELSE ReleaseUnperformed(answer)

----------------------------------------------------------------------------

StepsAsks == [mode: {"in_steps", "at_most_once"}, body: {1}]

StepsInit == Init /\ paid = effects /\ sent = effects

Works(c) == \E answer \in {"stored", "nothing"} : FinishStep(c, answer) \/ BeginStep(c, answer)

Unsettled(r) == r # None /\ ~r.done /\ r.lease # "live"
Settles      == (Unsettled(record) /\ Show) \/ \E answer \in {"settled", "nothing"} : Decide(answer)

StepsNext ==
    \/ \E c \in Callers : Works(c) \/ Send(c) \/ CommitStep(c)
    \/ Other /\ UNCHANGED stepVars
    \/ Settles \/ (\E answer \in {"settled", "nothing"} : Forget(answer))
    \/ CommitOf(Operator) /\ UNCHANGED stepVars

StepsFairness == WF_allVars(Settles) /\ WF_allVars(CommitOf(Operator) /\ UNCHANGED stepVars)
StepsSpec     == StepsInit /\ [][StepsNext]_allVars /\ StepsFairness

(* `pay` takes effect once, and `send` at most once.                         *)
PaidOnce == \A life \in 0..Ends : paid[life] <= 1
SentOnce == \A life \in 0..Ends : sent[life] <= 1

(* An operation in steps that a caller has completed has done every step.    *)
AllStepsDone == \A c \in Callers : Answered(c) /\ call[c].mode = "in_steps" /\ call[c].by \in Callers =>
    paid[call[c].life] = 1 /\ sent[call[c].life] = 1

(* Whatever is in doubt is settled.                                          *)
Doubtful     == Unsettled(record) /\ ~Retriable(record)
DoubtEnds    == Doubtful ~> ~Doubtful
=============================================================================

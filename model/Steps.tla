-------------------------------- MODULE Steps --------------------------------
\* Operations in steps, and the operator who settles what is in doubt.
\* The operation has two steps. `pay` writes in this database, and its result commits with it. `send` calls another
\* service, at most once: the record stores that the step begins, and then its result.
EXTENDS Record

\* The last statement of the transaction of `pay`, and the statement after `send`: token = mine, and no result is there.
FinishStep(c, answer) ==
    LET step  == IF call[c].at = "pay" THEN "pay" ELSE "send"
        steps == [record.steps EXCEPT ![step] = "done"] IN
    /\ call[c].at \in {"pay", "sent"}
    /\ Update(c, answer, Owns(c) /\ record.steps[step] # "done", [steps |-> steps], NextStep(steps))

\* token = mine, the lease is live, and the step is neither begun nor finished
BeginStep(c, answer) ==
    /\ call[c].at = "send"
    /\ Update(c, answer, IsLive(c) /\ record.steps.send = "new",
              [steps |-> [record.steps EXCEPT !.send = "begun"], expired |-> FALSE], "sending")

\* The effect of `send`: only while the lease is live by the owner's clock.
Send(c) ==
    /\ call[c].at = "sending" /\ UNCHANGED <<record, written, lock, rest>>
    /\ IF IsLive(c) THEN Count(c, "send") /\ Go(c, "sent") ELSE UNCHANGED effects /\ Go(c, "failed")

---------------------------- \* The operator
\* The operator sees the record, and asks the other service whether the effect has happened.
Compared == {"token", "beats", "steps", "done"}
Show == LET took == effects[record.life][IF record.mode = "in_steps" THEN "send" ELSE "perform"] > 0 IN
        /\ shown = None /\ record # None /\ UNCHANGED <<record, written, lock, call, effects, ended>>
        /\ shown' = [mode |-> record.mode, took |-> took] @@ [column \in Compared |-> record[column]]

\* Each decision changes the record only as it was shown, and not under a live lease.
AsShown == record # None /\ record.lease # "live" /\ \A column \in Compared : record[column] = shown[column]

\* What each decision writes. It keeps the result of a step, and the key is new after it has been forgotten.
Released(send) == [lease |-> "released", token |-> Fresh(Operator), steps |-> [record.steps EXCEPT !.send = send]]
Decided(decision) ==
    CASE decision = "resolve"      -> [token |-> Fresh(Operator)] @@ Completed
      [] decision = "release unperformed" -> Released(IF record.steps.send = "done" THEN "done" ELSE "new")
      [] decision = "settle step"  -> Released("done")
      [] decision = "release step" -> Released("new")
      [] decision = "forget"       -> Deleted

Settle(decision, answer) ==
    LET due == AsShown /\ (decision = "forget" \/ ~record.done) IN
    /\ shown # None /\ written[Operator] = None /\ shown' = None
    /\ \/ answer = "stored"  /\ due /\ Unwritten(Operator) /\ Write(Operator, Decided(decision))
       \/ answer = "nothing" /\ ~due /\ UNCHANGED written
    /\ UNCHANGED <<record, lock, call, effects, ended>>

---------------------------- \* The promises
\* `pay` takes effect once, and `send` at most once.
PaidOnce == \A life \in 0..Ends : effects[life].pay <= 1
SentOnce == \A life \in 0..Ends : effects[life].send <= 1

\* Within a life, an operation is not performed in steps and then as a whole, or the other way round.
OneWay == \A life \in 0..Ends : effects[life].perform = 0 \/ (effects[life].pay = 0 /\ effects[life].send = 0)

\* An operation in steps that is complete has done every step.
AllStepsDone == record # None /\ record.done /\ record.mode = "in_steps" =>
    effects[record.life].pay = 1 /\ effects[record.life].send = 1

\* Whatever is in doubt is settled.
Doubtful  == record # None /\ ~record.done /\ record.lease # "live" /\ ~Retriable(record)
DoubtEnds == Doubtful ~> ~Doubtful
=============================================================================

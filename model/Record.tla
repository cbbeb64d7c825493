------------------------------- MODULE Record -------------------------------
(* One key of pg-idempotency: its record, and the callers that claim it.     *)
(*                                                                           *)
(* Each action is one message between a caller and PostgreSQL. The action    *)
(* has the name of the message in the comment of its SQL: the statement      *)
(* `pg_idempotency: take over` is the action TakeOver. The parameters are    *)
(* the actor and the server's answer. PostgreSQL runs at READ COMMITTED: a   *)
(* statement sees what other transactions have committed, an UPDATE waits    *)
(* while another open transaction has written the row, and all that a        *)
(* transaction has written appears at its COMMIT.                            *)
(*                                                                           *)
(* There is one key, because no statement touches the record of another key. *)
(* Time is two facts about a record: whether its lease has lapsed, and       *)
(* whether its retention has ended.                                          *)
EXTENDS Naturals, FiniteSets, TLC

CONSTANTS
    Callers,   \* The processes that call. A process may call again.
    Janitor,   \* The process that deletes expired records.
    Operator,  \* The person who settles what is in doubt (Steps.tla).
    Terms,     \* What a caller may ask for: records of a mode and a body.
    HasSteps,  \* Whether an operation in steps has steps (Steps.tla).
    Ends,      \* How often the retention may end in one behaviour.
    Beats,     \* How often the owner of a claim renews its lease.
    None,      \* No record, or nobody.
    Deleted    \* What a transaction has written that deletes the record.

VARIABLES
    record,    \* The committed record of the key, or None.
    written,   \* For each actor: the row that its open transaction has written.
    lock,      \* The caller whose transaction holds the advisory lock of the key.
    call,      \* For each caller: what it asks, where it is, and its answer.
    effects,   \* For each life of the record: how many effects there are, up to 2.
    ended,     \* How many lives have ended.
    shown      \* The record that the operator has seen (Steps.tla), or None.

rest == <<ended, shown>>
vars == <<record, written, lock, call, effects, rest>>

Actors  == Callers \cup {Janitor, Operator}
Repeats == {"at_least_once", "in_steps"}      \* A lapsed claim is taken over.
Leased  == Repeats \cup {"at_most_once"}      \* The effect is outside the database.
NoSteps == [pay |-> "new", send |-> "new"]    \* Steps.tla gives these a meaning.

----------------------------------------------------------------------------
(* What a record means.                                                      *)

Expired(r)   == r.expired /\ r.lease # "live"
InDoubt(r)   == \E s \in DOMAIN r.steps : r.steps[s] = "begun"
Retriable(r) == /\ ~r.done /\ ~InDoubt(r)
                /\ r.lease = "released" \/ (r.lease = "lapsed" /\ r.mode \in Repeats)

(* Whether a call in mode `asked` may use this record.                       *)
MayFollow(r, asked) ==
    CASE r.mode = asked -> TRUE
      [] r.mode = "at_least_once" /\ asked = "in_steps" -> r.done \/ r.lease = "live"
      [] r.mode = "in_steps" /\ asked = "at_least_once" -> r.done
      [] OTHER -> FALSE

Answers == {"take over as new", "take over", "replayed", "InFlight", "KeyReused", "OtherMode", "Indeterminate"}

(* The table of answers: the first line that matches decides.                *)
Answer(r, asks) ==
    CASE Expired(r) -> "take over as new"
      [] ~MayFollow(r, asks.mode) -> "OtherMode"
      [] r.body # asks.body /\ r.lease = "released" /\ r.mode \notin Repeats /\ ~r.done -> "take over as new"
      [] r.body # asks.body -> "KeyReused"
      [] r.done -> "replayed"
      [] r.lease = "live" -> "InFlight"
      [] Retriable(r) -> "take over"
      [] OTHER -> "Indeterminate"

----------------------------------------------------------------------------
(* What the actions share.                                                   *)

CanLock(c)   == lock \in {None, c}
Unwritten(a) == \A b \in Actors \ {a} : written[b] = None   \* No other transaction has the row.
IsRow(w)     == w \notin {None, Deleted}

(* A token that is drawn at random, and so is new.                           *)
Known == {call[c].token : c \in Callers} \cup {written[a].token : a \in {b \in Actors : IsRow(written[b])}}
             \cup {row.token : row \in {record, shown} \ {None}}
Fresh == CHOOSE t \in 1..(2 * Cardinality(Actors) + 2) : t \notin Known

(* The row of a first claim.                                                 *)
NewRow(c) ==
    [mode |-> call[c].mode, body |-> call[c].body, token |-> Fresh, life |-> ended, expired |-> FALSE,
     lease |-> IF call[c].mode \in Leased THEN "live" ELSE "none", beats |-> 0, steps |-> NoSteps,
     done |-> call[c].mode = "mark", by |-> IF call[c].mode = "mark" THEN c ELSE None]

Go(c, place)   == call' = [call EXCEPT ![c].at = place]
Write(a, row)  == written' = [written EXCEPT ![a] = row]
Count(c, n)    == effects' = [effects EXCEPT ![call[c].life] = IF @ + n > 2 THEN 2 ELSE @ + n]

(* The call returns. Its transaction has to end only if it has the lock.     *)
Done(c, answer, by, life) ==
    [call[c] EXCEPT !.answer = answer, !.by = by, !.life = life, !.token = 0, !.at = "done", !.then = "done"]
Over(c, answer, by, life) ==
    [Done(c, answer, by, life) EXCEPT !.at = IF lock = c THEN "end" ELSE "done"]
Replay(c, by, life) == call' = [call EXCEPT ![c] = Over(c, "replayed", by, life)]
Refuse(c)           == call' = [call EXCEPT ![c] = Over(c, "none", None, 0)]

(* An open transaction has the key: the call waits, or it is InFlight.       *)
Wait(c) == Go(c, "await") \/ Refuse(c)

(* The call looks once more. After ten looks it gives up.                    *)
LookAgain(c) == Go(c, "look") \/ Refuse(c)

(* Where the owner of a claim begins to work.                                *)
NextStep(steps) == IF steps.pay = "new" THEN "pay" ELSE IF steps.send = "new" THEN "send" ELSE "complete"
Begins(row)     == IF row.mode = "in_steps" /\ HasSteps THEN NextStep(row.steps) ELSE "perform"

(* The call sends its COMMIT, and goes on here.                              *)
CommitThen(c, then) == call' = [call EXCEPT ![c] = [@ EXCEPT !.at = "commit", !.then = then]]

(* The statement has won the claim. The claim of a lease commits at once.    *)
Win(c, row) ==
    /\ lock' = c
    /\ Write(c, row)
    /\ call' = [call EXCEPT ![c] = [@ EXCEPT !.token = row.token, !.life = row.life, !.then = Begins(row),
                                             !.at = IF row.lease = "live" THEN "commit" ELSE "perform"]]
    /\ UNCHANGED <<record, effects, rest>>

----------------------------------------------------------------------------
(* The messages of a claim.                                                  *)

(* insert … where not exists (the record) and pg_try_advisory_xact_lock(…)   *)
(* on conflict do nothing                                                    *)
Claim(c, answer) ==
    /\ call[c].at = "claim"
    /\ \/ answer = "won"     /\ record = None /\ CanLock(c) /\ Unwritten(c)
                             /\ Win(c, NewRow(c))
       \/ answer = "nothing" /\ (record # None \/ ~CanLock(c))
                             /\ Go(c, "look") /\ UNCHANGED <<record, written, lock, effects, rest>>

(* select the record, or else pg_try_advisory_xact_lock(…)                   *)
Look(c, answer) ==
    /\ call[c].at = "look"
    /\ UNCHANGED <<record, written, effects, rest>>
    /\ \/ /\ record # None /\ answer = Answer(record, call[c]) /\ UNCHANGED lock
          /\ CASE answer \in {"take over", "take over as new"} ->
                  call' = [call EXCEPT ![c] = [@ EXCEPT !.at = answer, !.token = record.token]]
               [] answer = "replayed" -> Replay(c, record.by, record.life)
               [] OTHER -> Refuse(c)
       \/ answer = "free" /\ record = None /\ CanLock(c) /\ lock' = c /\ Go(c, "claim")
       \/ answer = "held" /\ record = None /\ ~CanLock(c) /\ UNCHANGED lock
                          /\ Wait(c)

(* update … where token = the one that the look saw, and it may still be     *)
(* taken over; under the lock, and skipping a row that is locked             *)
TakeOver(c, answer) ==
    LET again == call[c].at = "take over"
        same  == record # None /\ record.token = call[c].token
        \* As a first attempt, only what is released: a lapsed record may be of another mode or body.
        due   == same /\ \/ Retriable(record) /\ (again \/ record.lease = "released")
                         \/ ~again /\ Expired(record)
        life  == IF ~again /\ Expired(record) THEN ended ELSE record.life
    IN
    /\ call[c].at \in {"take over", "take over as new"}
    /\ \/ answer = "changed" /\ ~same /\ UNCHANGED <<lock, written>> /\ LookAgain(c)
       \/ answer = "held"    /\ same /\ ~CanLock(c) /\ UNCHANGED <<lock, written>> /\ Wait(c)
       \/ answer = "locked"  /\ same /\ CanLock(c) /\ ~Unwritten(c) /\ lock' = c /\ UNCHANGED written /\ LookAgain(c)
       \/ answer = "kept"    /\ same /\ CanLock(c) /\ Unwritten(c) /\ ~due /\ lock' = c /\ UNCHANGED written
                             /\ LookAgain(c)
       \/ answer = "won"     /\ due /\ CanLock(c) /\ Unwritten(c)
                             /\ Win(c, [NewRow(c) EXCEPT !.life = life, !.steps = IF again THEN record.steps ELSE NoSteps])
    /\ UNCHANGED <<record, effects, rest>>

(* select idempotency.await_key(…): waits for the lock, for a limited time   *)
Await(c, answer) ==
    /\ call[c].at = "await"
    /\ \/ answer = "claim"   /\ CanLock(c) /\ record = None /\ lock' = c /\ Go(c, "claim")
       \/ answer = "look"    /\ CanLock(c) /\ record # None /\ Go(c, "look")
                             /\ lock' = IF Expired(record) \/ (Retriable(record) /\ record.mode = call[c].mode)
                                        THEN c ELSE lock
       \/ answer = "timeout" /\ ~CanLock(c) /\ UNCHANGED lock /\ Go(c, "look")
    /\ UNCHANGED <<record, written, effects, rest>>

----------------------------------------------------------------------------
(* The messages of a call in transaction mode, and of a mark.                *)

InTransaction(c) == call[c].mode \notin Leased
Owns(c)          == record # None /\ record.token = call[c].token /\ ~record.done
IsLive(c)        == Owns(c) /\ record.lease = "live"

(* The effect: in the transaction of the claim, or in the outside world. An  *)
(* owner works only while its lease is live, by a clock of its own.          *)
Perform(c) ==
    /\ call[c].at = "perform"
    /\ IF InTransaction(c) THEN UNCHANGED effects /\ (IF call[c].mode = "mark" THEN CommitThen(c, "done")
                                                     ELSE Go(c, "complete"))
       ELSE IF IsLive(c) THEN Count(c, 1) /\ Go(c, "complete") ELSE UNCHANGED effects /\ Refuse(c)
    /\ UNCHANGED <<record, written, lock, rest>>

(* update … where token = mine and claimed_at = now(): so only in the        *)
(* transaction of the claim                                                  *)
Complete(c, answer) ==
    /\ call[c].at = "complete" /\ InTransaction(c)
    /\ \/ answer = "stored"  /\ IsRow(written[c])
                             /\ Write(c, [written[c] EXCEPT !.done = TRUE, !.by = c]) /\ CommitThen(c, "done")
       \/ answer = "nothing" /\ ~IsRow(written[c]) /\ UNCHANGED written /\ Refuse(c)
    /\ UNCHANGED <<record, lock, effects, rest>>

(* Behind a savepoint, `perform` has failed, and its effect is undone.       *)
ReleaseInTransaction(c) ==
    /\ call[c].at = "complete" /\ InTransaction(c) /\ IsRow(written[c])
    /\ Write(c, [written[c] EXCEPT !.lease = "released", !.token = Fresh]) /\ CommitThen(c, "done")
    /\ UNCHANGED <<record, lock, effects, rest>>

----------------------------------------------------------------------------
(* The messages of the owner of a lease, each in a transaction of its own.   *)

(* update … where token = mine and completed_at is null                      *)
CompleteLease(c, answer) ==
    /\ call[c].at = "complete" /\ ~InTransaction(c) /\ Unwritten(c)
    /\ \/ answer = "stored"  /\ Owns(c) /\ CommitThen(c, "done")
                             /\ Write(c, [record EXCEPT !.done = TRUE, !.by = c, !.lease = "none", !.steps = NoSteps,
                                                        !.expired = FALSE])
       \/ answer = "nothing" /\ UNCHANGED written /\ ~Owns(c)
          \* Its own response may be there, because its COMMIT got no answer.
          /\ IF record # None /\ record.token = call[c].token THEN call' = [call EXCEPT ![c] = Over(c, "performed", c, call[c].life)]
             ELSE Refuse(c)
    /\ UNCHANGED <<record, lock, effects, rest>>

Heartbeat(c, answer) ==
    /\ call[c].at \in {"perform", "complete", "send", "sending"} /\ ~InTransaction(c) /\ Unwritten(c)
    /\ \/ answer = "renewed" /\ Owns(c) /\ record.lease # "released" /\ record.beats < Beats
                             /\ CommitThen(c, call[c].at)
                             /\ Write(c, [record EXCEPT !.lease = "live", !.expired = FALSE, !.beats = @ + 1])
       \/ answer = "nothing" /\ ~Owns(c) /\ UNCHANGED written /\ Refuse(c)
    /\ UNCHANGED <<record, lock, effects, rest>>

(* The owner gives the claim up. Under AtMostOnce only before the effect.    *)
Release(c, answer) ==
    /\ ~InTransaction(c) /\ Unwritten(c)
    /\ call[c].at \in {"perform", "pay", "send", "sending"} \/ (call[c].at = "complete" /\ call[c].mode \in Repeats)
    /\ \/ answer = "released" /\ Owns(c) /\ CommitThen(c, "done")
                              /\ Write(c, [record EXCEPT !.lease = "released", !.token = Fresh])
       \/ answer = "nothing"  /\ ~Owns(c) /\ UNCHANGED written /\ Refuse(c)
    /\ UNCHANGED <<record, lock, effects, rest>>

(* Under AtMostOnce, the work has failed and may have taken effect.          *)
Lapse(c, answer) ==
    /\ call[c].at = "complete" /\ call[c].mode = "at_most_once" /\ Unwritten(c)
    /\ \/ answer = "lapsed"  /\ Owns(c) /\ record.lease # "released" /\ CommitThen(c, "done")
                             /\ Write(c, [record EXCEPT !.lease = "lapsed", !.token = Fresh])
       \/ answer = "nothing" /\ ~(Owns(c) /\ record.lease # "released") /\ UNCHANGED written
                             /\ Refuse(c)
    /\ UNCHANGED <<record, lock, effects, rest>>

----------------------------------------------------------------------------
(* The ends of transactions.                                                 *)

(* What the transaction of this actor has written appears.                   *)
Appear(a) ==
    /\ record' = IF written[a] = None THEN record ELSE IF written[a] = Deleted THEN None ELSE written[a]
    /\ Write(a, None)
    /\ lock' = IF lock = a THEN None ELSE lock

Vanish(a) == Write(a, None) /\ lock' = (IF lock = a THEN None ELSE lock) /\ UNCHANGED record

Commit(c) ==
    /\ call[c].at \in {"commit", "end"} /\ Appear(c) /\ UNCHANGED rest
    /\ IF call[c].at = "end" THEN Go(c, "done") /\ UNCHANGED effects
       ELSE IF call[c].then # "done" THEN Go(c, call[c].then) /\ UNCHANGED effects
       ELSE IF written[c].done
       THEN /\ Count(c, IF InTransaction(c) THEN 1 ELSE 0)
            /\ call' = [call EXCEPT ![c] = Done(c, "performed", c, call[c].life)]
       ELSE UNCHANGED effects /\ call' = [call EXCEPT ![c] = Done(c, "none", None, 0)]

Rollback(c) ==
    /\ call[c].at \in {"perform", "complete", "commit", "end"} /\ InTransaction(c) /\ Vanish(c)
    /\ call' = [call EXCEPT ![c] = IF call[c].at = "end" THEN [@ EXCEPT !.at = "done"] ELSE Done(c, "none", None, 0)]
    /\ UNCHANGED <<effects, rest>>

----------------------------------------------------------------------------
(* The janitor. It skips a row that another transaction has written.         *)

Sweep(answer) ==
    /\ written[Janitor] = None
    /\ LET due == record # None /\ Unwritten(Janitor) /\ Expired(record) IN
       \/ answer = "swept"   /\ due  /\ Write(Janitor, Deleted)
       \/ answer = "nothing" /\ ~due /\ UNCHANGED written
    /\ UNCHANGED <<record, lock, call, effects, rest>>

CommitOf(a) ==
    /\ a \notin Callers /\ written[a] # None /\ Appear(a) /\ UNCHANGED <<call, effects, shown>>
    /\ ended' = IF a = Operator /\ written[a] = Deleted /\ ~record.expired THEN ended + 1 ELSE ended

----------------------------------------------------------------------------
(* Faults, time, and calls that come again.                                  *)

(* The process or its connection is gone. What it has not committed vanishes.*)
Die(c) ==
    /\ call[c].at # "done" /\ Vanish(c)
    /\ call' = [call EXCEPT ![c] = Done(c, "none", None, 0)]
    /\ UNCHANGED <<effects, rest>>

(* The COMMIT succeeds, and its answer is lost. An owner stores once more.   *)
CommitUnheard(c) ==
    /\ call[c].at = "commit" /\ Appear(c) /\ UNCHANGED rest
    /\ Count(c, IF InTransaction(c) /\ written[c].done THEN 1 ELSE 0)
    /\ \/ call' = [call EXCEPT ![c] = Done(c, "none", None, 0)]
       \/ ~InTransaction(c) /\ written[c].done /\ Go(c, "complete")

(* A mistake: `perform` ends the transaction of the claim, and goes on.      *)
EndInside(c, how) ==
    /\ call[c].at = "complete" /\ InTransaction(c) /\ IsRow(written[c]) /\ UNCHANGED <<call, rest>>
    /\ \/ how = "commit"   /\ Appear(c) /\ Count(c, 1)
       \/ how = "rollback" /\ Vanish(c) /\ UNCHANGED effects

LeaseLapses == /\ record # None /\ record.lease = "live" /\ record' = [record EXCEPT !.lease = "lapsed"]
               /\ UNCHANGED <<written, lock, call, effects, rest>>

RetentionEnds == /\ record # None /\ ~record.expired /\ ended < Ends
                 /\ record' = [record EXCEPT !.expired = TRUE] /\ ended' = ended + 1
                 /\ UNCHANGED <<written, lock, call, effects, shown>>

Asks == [mode: {"transaction", "at_least_once", "at_most_once"}, body: {1, 2}] \cup [mode: {"mark"}, body: {1}]

Called(asks) == [mode |-> asks.mode, body |-> asks.body, at |-> "claim", then |-> "done", token |-> 0, life |-> 0,
                 answer |-> "none", by |-> None]

Again(c) == /\ call[c].at = "done" /\ call' = [call EXCEPT ![c] = Called(call[c])]
            /\ UNCHANGED <<record, written, lock, effects, rest>>

----------------------------------------------------------------------------

OnlyTransaction == [mode: {"transaction"}, body: {1}]
Few == [mode: {"transaction", "at_least_once"}, body: {1}]

Symmetry == Permutations(Callers)

Init == /\ record = None /\ written = [a \in Actors |-> None] /\ lock = None /\ ended = 0 /\ shown = None
        /\ call \in [Callers -> {Called(asks) : asks \in Terms}]
        /\ effects = [life \in 0..Ends |-> 0]

(* What a caller does by itself, but for its COMMIT.                         *)
GoesOn(c) ==
    \/ \E answer \in {"won", "nothing"} : Claim(c, answer)
    \/ \E answer \in Answers \cup {"free", "held"} : Look(c, answer)
    \/ \E answer \in {"changed", "held", "locked", "kept", "won"} : TakeOver(c, answer)
    \/ \E answer \in {"claim", "look", "timeout"} : Await(c, answer)
    \/ \E answer \in {"stored", "nothing"} : Complete(c, answer) \/ CompleteLease(c, answer)
    \/ Perform(c)

(* What may happen besides.                                                  *)
Happens(c) ==
    \/ ReleaseInTransaction(c) \/ Rollback(c)
    \/ \E answer \in {"renewed", "released", "lapsed", "nothing"} :
        Heartbeat(c, answer) \/ Release(c, answer) \/ Lapse(c, answer)
    \/ Die(c) \/ EndInside(c, "commit") \/ EndInside(c, "rollback") \/ Again(c)

Other ==
    \/ \E c \in Callers : GoesOn(c) \/ Happens(c)
    \/ CommitOf(Janitor) \/ \E answer \in {"swept", "nothing"} : Sweep(answer)
    \/ LeaseLapses \/ RetentionEnds

Next == Other \/ \E c \in Callers : Commit(c) \/ CommitUnheard(c)

(* A call goes on: a row lock is granted in the end, and a call does not look*)
(* or wait for ever.                                                         *)
Sends(c)   == GoesOn(c) \/ Commit(c)
Returns(c) == Sends(c) /\ call'[c].at \in {"end", "done"}
Fairness   == \A c \in Callers : SF_vars(Sends(c)) /\ SF_vars(Returns(c))

Spec == Init /\ [][Next]_vars /\ Fairness

----------------------------------------------------------------------------
(* The promises. *)

Answered(c) == call[c].at \in {"end", "done"} /\ call[c].answer \in {"performed", "replayed"}
Once(c)     == call[c].mode \notin Repeats

(* One effect for each key and retention, unless the policy repeats it.      *)
OneEffect == \A c \in Callers : Answered(c) /\ Once(c) => effects[call[c].life] = 1

(* No acknowledged effect is lost: the record has the answer for its life.   *)
NothingLost ==
    \A c \in Callers : Answered(c) =>
        /\ effects[call[c].life] > 0 \/ HasSteps
        /\ \/ call[c].life < ended
           \/ record # None /\ record.life = call[c].life /\ record.done /\ record.by = call[c].by

(* In one life of the record, all callers get the answer of the same call,   *)
(* which had the same body.                                                  *)
OneAnswer == \A c, d \in Callers :
    Answered(c) /\ Answered(d) /\ call[c].life = call[d].life => call[c].by = call[d].by /\ call[c].body = call[d].body

(* A stale owner stores nothing: the row that a caller writes over is its.   *)
OnlyTheOwnerStores == \A c \in Callers : 
    call[c].at = "commit" /\ lock # c /\ ~InTransaction(c) => record # None /\ record.token = call[c].token

(* A replay holds no lock.                                                   *)
ReplayHoldsNoLock == \A c \in Callers : call[c].at = "end" /\ InTransaction(c) => call[c].answer # "replayed"

(* Every call ends.                                                          *)
EveryCallEnds == \A c \in Callers : (call[c].at # "done") ~> (call[c].at = "done")
=============================================================================

------------------------------- MODULE Record -------------------------------
\* One key of pg-idempotency: its record, and the callers that claim it.
\*
\* Each action is one message between an actor and PostgreSQL, under the name in the comment of its SQL: the statement
\* `pg_idempotency: take over` is the action TakeOver. The parameters are the actor and the server's answer. PostgreSQL
\* runs at READ COMMITTED: a statement sees what other transactions have committed, and what a transaction has written
\* appears at its COMMIT. An UPDATE that matches the committed row waits while another open transaction has written the
\* row. An UPDATE that does not match the committed row does not wait.
\*
\* A statement is one step here. PostgreSQL takes a snapshot first, so another COMMIT can fall between the snapshot and
\* the lock of a claim. DESIGN.md describes what can happen then, and script/interleave tries it.
\*
\* There is one key, because no statement touches the record of another key. Time is two facts about a record: whether
\* its lease has lapsed, and whether its retention has ended.
EXTENDS Naturals, FiniteSets, TLC

CONSTANTS
    Callers,            \* The processes that call. A process may call again.
    Janitor, Operator,  \* The janitor deletes expired records. The operator settles what is in doubt (Steps.tla).
    Terms,              \* What a caller may ask for: a set of records of a mode and a body.
    HasSteps,           \* Whether an operation in steps has steps (Steps.tla).
    Ends, Beats,        \* At most how often the retention ends, and the owner of a claim renews its lease: bounds.
    None, Deleted       \* No record, or nobody. What a transaction has written that deletes the record.
VARIABLES
    record,   \* The committed record of the key, or None.
    written,  \* For each actor: the row that its open transaction has written, or None.
    lock,     \* The caller whose transaction holds the advisory lock of the key, or None.
    call,     \* For each caller: what it asks, where it is, the token that it knows, and whose answer it got.
    effects,  \* For each life of the record: how many effects there are, up to 2.
    ended,    \* How many lives have ended, by the retention or by the operator.
    shown     \* The record that the operator has seen (Steps.tla), or None.

rest    == <<ended, shown>>
vars    == <<record, written, lock, call, effects, rest>>
Actors  == Callers \cup {Janitor, Operator}
Repeats == {"at_least_once", "in_steps"}    \* The next caller takes a lapsed claim over.
Leased  == Repeats \cup {"at_most_once"}    \* The effect is outside the database. The other modes: transaction, mark.
NoSteps == [pay |-> "new", send |-> "new"]  \* Steps.tla gives these a meaning.

---------------------------- \* What a record means

Expired(r)   == r.expired /\ r.lease # "live"
InDoubt(r)   == \E s \in DOMAIN r.steps : r.steps[s] = "begun"
Retriable(r) == ~r.done /\ ~InDoubt(r) /\ (r.lease = "released" \/ (r.lease = "lapsed" /\ r.mode \in Repeats))

\* Whether a call in the mode `asked` may use this record.
MayFollow(r, asked) ==
    CASE r.mode = asked -> TRUE
      [] r.mode = "at_least_once" /\ asked = "in_steps" -> r.done \/ r.lease = "live"
      [] r.mode = "in_steps" /\ asked = "at_least_once" -> r.done
      [] OTHER -> FALSE

\* The table of answers: the first line that matches decides.
Answer(r, asks) ==
    CASE Expired(r) -> "take over as new"
      [] ~MayFollow(r, asks.mode) -> "OtherMode"
      [] r.body # asks.body /\ r.lease = "released" /\ r.mode \notin Repeats /\ ~r.done -> "take over as new"
      [] r.body # asks.body -> "KeyReused"
      [] r.done -> "replayed"
      [] r.lease = "live" -> "InFlight"
      [] Retriable(r) -> "take over"
      [] OTHER -> "Indeterminate"
Answers == {"take over as new", "take over", "replayed", "InFlight", "KeyReused", "OtherMode", "Indeterminate"}

---------------------------- \* What the actions share

CanLock(c)   == lock \in {None, c}
Unwritten(a) == \A b \in Actors \ {a} : written[b] = None  \* No other open transaction has written the row.
IsRow(w)     == w \notin {None, Deleted}

\* A token that is drawn at random, and so is new.
Rows  == {written[a] : a \in Actors} \cup {record, shown}
Fresh == CHOOSE t \in 1..(2 * Cardinality(Actors) + 2) :
             t \notin {call[c].token : c \in Callers} \cup {row.token : row \in {row \in Rows : IsRow(row)}}

NewRow(c) ==
    [mode |-> call[c].mode, body |-> call[c].body, token |-> Fresh, life |-> ended, expired |-> FALSE,
     lease |-> IF call[c].mode \in Leased THEN "live" ELSE "none", beats |-> 0, steps |-> NoSteps,
     done |-> call[c].mode = "mark", by |-> IF call[c].mode = "mark" THEN c ELSE "nobody"]

Go(c, place)  == call' = [call EXCEPT ![c].at = place, ![c].then = "done"]
Write(a, row) == written' = [written EXCEPT ![a] = row]
Count(c, n)   == effects' = [effects EXCEPT ![call[c].life] = IF @ + n > 2 THEN 2 ELSE @ + n]

\* The call has the answer of this actor, or is refused. Its transaction still has to end if it holds the lock.
Ended(c, by, life)  == [call[c] EXCEPT !.by = by, !.life = life, !.token = 0, !.at = "done", !.then = "done"]
Return(c, by, life) == call' = [call EXCEPT ![c] = [Ended(c, by, life) EXCEPT !.at = IF lock = c THEN "end" ELSE "done"]]
Refuse(c)           == Return(c, None, 0)

TryAgain(c, place) == call' = [call EXCEPT ![c].at = place, ![c].token = 0]
Wait(c)      == TryAgain(c, "await") \/ Refuse(c)  \* An open transaction has the key: OnDuplicate decides.
LookAgain(c) == TryAgain(c, "look") \/ Refuse(c)   \* After ten looks without a wait, the call is told InFlight.

\* The call sends its COMMIT, and then goes on at this place.
CommitThen(c, then) == call' = [call EXCEPT ![c].at = "commit", ![c].then = then]

\* Where the owner of a claim begins to work.
NextStep(steps) == IF steps.pay = "new" THEN "pay" ELSE IF steps.send = "new" THEN "send" ELSE "complete"
Begins(row)     == IF row.mode = "in_steps" /\ HasSteps THEN NextStep(row.steps) ELSE "perform"

\* The statement has won the claim. The claim of a lease commits at once.
Win(c, row) ==
    /\ lock' = c /\ Write(c, row) /\ UNCHANGED <<record, effects, rest>>
    /\ call' = [call EXCEPT ![c].token = row.token, ![c].life = row.life, ![c].then = Begins(row),
                            ![c].at = IF row.lease = "live" THEN "commit" ELSE "perform"]

---------------------------- \* The messages of a claim

\* insert … where not exists (the record) and pg_try_advisory_xact_lock(…) on conflict do nothing
Claim(c, answer) ==
    /\ call[c].at = "claim"
    /\ \/ answer = "won"     /\ record = None /\ CanLock(c) /\ Unwritten(c)
                             /\ Win(c, NewRow(c))
       \/ answer = "nothing" /\ (record # None \/ ~CanLock(c))
                             /\ Go(c, "look") /\ UNCHANGED <<record, written, lock, effects, rest>>

\* select the record, or else pg_try_advisory_xact_lock(…)
Look(c, answer) ==
    /\ call[c].at = "look" /\ UNCHANGED <<record, written, effects, rest>>
    /\ \/ /\ record # None /\ answer = Answer(record, call[c]) /\ UNCHANGED lock
          /\ CASE answer \in {"take over", "take over as new"} ->
                  call' = [call EXCEPT ![c].at = answer, ![c].token = record.token]
               [] answer = "replayed" -> Return(c, record.by, record.life)
               [] OTHER -> Refuse(c)
       \/ answer = "free" /\ record = None /\ CanLock(c) /\ lock' = c /\ Go(c, "claim")
       \/ answer = "held" /\ record = None /\ ~CanLock(c) /\ UNCHANGED lock /\ Wait(c)

\* update … where token = the one that the look saw, and the record may still be taken over: under the lock, and without
\* a wait for the row. A first attempt takes over only what is expired or released: a record that has become live and
\* has lapsed since the look may be of another mode or body.
TakeOver(c, answer) ==
    LET again == call[c].at = "take over"
        same  == record # None /\ record.token = call[c].token
        due   == same /\ \/ Retriable(record) /\ (again \/ record.lease = "released")
                         \/ ~again /\ Expired(record)
        life  == IF ~again /\ Expired(record) THEN ended ELSE record.life
    IN
    /\ call[c].at \in {"take over", "take over as new"} /\ UNCHANGED <<record, effects, rest>>
    /\ \/ answer = "changed" /\ ~same /\ UNCHANGED <<lock, written>> /\ LookAgain(c)
       \/ answer = "held"    /\ same /\ ~CanLock(c) /\ UNCHANGED <<lock, written>> /\ Wait(c)
       \/ answer = "locked"  /\ same /\ CanLock(c) /\ ~Unwritten(c) /\ lock' = c /\ UNCHANGED written /\ LookAgain(c)
       \/ answer = "kept"    /\ same /\ CanLock(c) /\ Unwritten(c) /\ ~due /\ lock' = c /\ UNCHANGED written
                             /\ LookAgain(c)
       \/ answer = "won"     /\ due /\ CanLock(c) /\ Unwritten(c)
                             /\ Win(c, [NewRow(c) EXCEPT !.life = life, !.steps = IF again THEN record.steps ELSE NoSteps])

\* select idempotency.await_key(…): waits for the lock, for a limited time
Await(c, answer) ==
    /\ call[c].at = "await" /\ UNCHANGED <<record, written, effects, rest>>
    /\ \/ answer = "claim"   /\ CanLock(c) /\ record = None /\ lock' = c /\ Go(c, "claim")
       \/ answer = "look"    /\ CanLock(c) /\ record # None /\ Go(c, "look")
                             /\ lock' = IF Expired(record) \/ (Retriable(record) /\ record.mode = call[c].mode)
                                        THEN c ELSE lock
       \/ answer = "timeout" /\ ~CanLock(c) /\ UNCHANGED lock /\ Go(c, "look")

---------------------------- \* The messages of a call in transaction mode, and of a mark

InTransaction(c) == call[c].mode \notin Leased
Owns(c)          == record # None /\ record.token = call[c].token /\ ~record.done
IsLive(c)        == Owns(c) /\ record.lease = "live"

\* The effect: in the transaction of the claim, or in the outside world. An owner works only while its lease is live, by
\* a clock of its own.
Perform(c) ==
    /\ call[c].at = "perform" /\ UNCHANGED <<record, written, lock, rest>>
    /\ CASE call[c].mode = "mark" -> UNCHANGED effects /\ CommitThen(c, "done")
         [] call[c].mode = "transaction" -> UNCHANGED effects /\ Go(c, "complete")
         [] OTHER -> IF IsLive(c) THEN Count(c, 1) /\ Go(c, "complete") ELSE UNCHANGED effects /\ Refuse(c)

\* update … where token = mine and claimed_at = now(): only in the transaction of the claim
Complete(c, answer) ==
    /\ call[c].at = "complete" /\ InTransaction(c) /\ UNCHANGED <<record, lock, effects, rest>>
    /\ \/ answer = "stored"  /\ IsRow(written[c])
                             /\ Write(c, [written[c] EXCEPT !.done = TRUE, !.by = c]) /\ CommitThen(c, "done")
       \/ answer = "nothing" /\ ~IsRow(written[c]) /\ UNCHANGED written /\ Refuse(c)

\* Behind a savepoint, `perform` has failed, and its effect is undone.
ReleaseInTransaction(c) ==
    /\ call[c].at = "complete" /\ InTransaction(c) /\ IsRow(written[c]) /\ UNCHANGED <<record, lock, effects, rest>>
    /\ Write(c, [written[c] EXCEPT !.lease = "released", !.token = Fresh]) /\ CommitThen(c, "done")

---------------------------- \* The messages of the owner of a lease, each in a transaction of its own

\* update … where token = mine and completed_at is null. Without a row, the claim is gone, or the owner's own response
\* is there, because its COMMIT got no answer.
Update(c, answer, due, row, then) ==
    /\ UNCHANGED <<record, lock, effects, rest>>
    /\ \/ answer = "stored"  /\ due /\ Unwritten(c) /\ Write(c, row) /\ CommitThen(c, then)
       \/ answer = "nothing" /\ UNCHANGED written /\ ~due
          /\ IF record # None /\ record.token = call[c].token /\ record.done /\ record.by = c
             THEN Return(c, c, call[c].life)
             ELSE IF call[c].at \in {"pay", "send", "sent"} THEN Go(c, "failed") ELSE Refuse(c)

CompleteLease(c, answer) ==
    /\ call[c].at = "complete" /\ ~InTransaction(c)
    /\ Update(c, answer, Owns(c),
              [record EXCEPT !.done = TRUE, !.by = c, !.lease = "none", !.steps = NoSteps, !.expired = FALSE], "done")

\* A task of its own sends it. After "nothing", the owner learns at its next statement that the claim is gone.
Heartbeat(c, answer) ==
    LET due == Owns(c) /\ record.lease # "released" IN
    /\ call[c].at \in {"perform", "complete", "send", "sending"} /\ ~InTransaction(c)
    /\ \/ answer = "stored" /\ due /\ record.beats < Beats
          /\ Update(c, answer, due, [record EXCEPT !.lease = "live", !.expired = FALSE, !.beats = @ + 1], call[c].at)
       \/ answer = "nothing" /\ ~due /\ UNCHANGED vars

\* The work has failed, and certainly has had no effect that must not be repeated.
Release(c, answer) ==
    /\ ~InTransaction(c)
    /\ call[c].at \in {"perform", "pay", "send", "failed"} \/ (call[c].at = "complete" /\ call[c].mode \in Repeats)
    /\ Update(c, answer, Owns(c), [record EXCEPT !.lease = "released", !.token = Fresh], "done")

\* The work has failed, and may have had such an effect.
Lapse(c, answer) ==
    /\ call[c].at \in {"sending", "sent", "failed"} \/ (call[c].at = "complete" /\ call[c].mode = "at_most_once")
    /\ Update(c, answer, Owns(c) /\ record.lease # "released", [record EXCEPT !.lease = "lapsed", !.token = Fresh], "done")

---------------------------- \* The ends of transactions

Unlock(a) == lock' = IF lock = a THEN None ELSE lock
Vanish(a) == Write(a, None) /\ Unlock(a) /\ UNCHANGED record
Appear(a) == /\ record' = IF written[a] = None THEN record ELSE IF written[a] = Deleted THEN None ELSE written[a]
             /\ Write(a, None) /\ Unlock(a)

\* In transaction mode, the effect appears with the response. If the caller does not hear of its COMMIT, the owner of a
\* lease stores its response once more.
Commit(c, answer) ==
    /\ call[c].at \in {"commit", "end"} /\ Appear(c) /\ UNCHANGED rest
    /\ Count(c, IF call[c].at = "commit" /\ InTransaction(c) /\ written[c].done THEN 1 ELSE 0)
    /\ CASE call[c].at = "end" -> answer = "heard" /\ Go(c, "done")
         [] answer = "unheard" -> \/ call' = [call EXCEPT ![c] = Ended(c, None, 0)]
                                  \/ ~InTransaction(c) /\ written[c].done /\ Go(c, "complete")
         [] call[c].then # "done" -> Go(c, call[c].then)
         [] OTHER -> call' = [call EXCEPT ![c] = IF written[c].done THEN Ended(c, c, @.life) ELSE Ended(c, None, 0)]

Rollback(c) ==
    /\ call[c].at \in {"perform", "complete", "commit", "end"} /\ InTransaction(c) /\ Vanish(c)
    /\ IF call[c].at = "end" THEN Go(c, "done") ELSE call' = [call EXCEPT ![c] = Ended(c, None, 0)]
    /\ UNCHANGED <<effects, rest>>

\* The janitor deletes a record, and skips a row that another transaction has written.
Sweep(answer) ==
    LET due == record # None /\ Unwritten(Janitor) /\ Expired(record) IN
    /\ written[Janitor] = None /\ UNCHANGED <<record, lock, call, effects, rest>>
    /\ \/ answer = "swept"   /\ due  /\ Write(Janitor, Deleted)
       \/ answer = "nothing" /\ ~due /\ UNCHANGED written

CommitOf(a) ==
    /\ a \notin Callers /\ written[a] # None /\ Appear(a) /\ UNCHANGED <<call, effects, shown>>
    /\ ended' = IF a = Operator /\ written[a] = Deleted /\ ~record.expired THEN ended + 1 ELSE ended

---------------------------- \* Faults, time, and calls that come again

\* The process or its connection is gone. What it has not committed vanishes.
Die(c) ==
    /\ call[c].at # "done" /\ Vanish(c) /\ call' = [call EXCEPT ![c] = Ended(c, None, 0)]
    /\ UNCHANGED <<effects, rest>>

\* A mistake: `perform` ends the transaction of the claim, and goes on.
EndInside(c, how) ==
    /\ call[c].at = "complete" /\ InTransaction(c) /\ IsRow(written[c]) /\ UNCHANGED <<call, rest>>
    /\ \/ how = "commit"   /\ Appear(c) /\ Count(c, 1)
       \/ how = "rollback" /\ Vanish(c) /\ UNCHANGED effects

LeaseLapses == /\ record # None /\ record.lease = "live" /\ record' = [record EXCEPT !.lease = "lapsed"]
               /\ UNCHANGED <<written, lock, call, effects, rest>>

RetentionEnds == /\ record # None /\ ~record.expired /\ ended < Ends /\ record' = [record EXCEPT !.expired = TRUE]
                 /\ ended' = ended + 1 /\ UNCHANGED <<written, lock, call, effects, shown>>

Called(asks) == [mode |-> asks.mode, body |-> asks.body, at |-> "claim", then |-> "done", token |-> 0, life |-> 0,
                 by |-> None]

Again(c) == /\ call[c].at = "done" /\ call' = [call EXCEPT ![c] = Called(@)]
            /\ UNCHANGED <<record, written, lock, effects, rest>>

---------------------------- \* The whole

Init == /\ record = None /\ written = [a \in Actors |-> None] /\ lock = None /\ ended = 0 /\ shown = None
        /\ call \in [Callers -> {Called(asks) : asks \in Terms}] /\ effects = [life \in 0..Ends |-> 0]

\* A hook for Coverage.tla and Trace.tla.
Noted(actor, message, answer) == TRUE

\* The actor sends this message, and the server gives one of these answers.
Says(Action(_, _), actor, message, answers) ==
    \E answer \in answers : Action(actor, answer) /\ Noted(actor, message, answer)
Either == {"stored", "nothing"}

\* What a caller does by itself, but for its COMMIT.
GoesOn(c) ==
    \/ Says(Claim, c, "claim", {"won", "nothing"})
    \/ Says(Look, c, "look", Answers \cup {"free", "held"})
    \/ Says(TakeOver, c, "take over", {"changed", "held", "locked", "kept", "won"})
    \/ Says(Await, c, "await", {"claim", "look", "timeout"})
    \/ Says(Complete, c, "complete", Either)
    \/ Says(CompleteLease, c, "complete lease", Either)
    \/ Perform(c) /\ Noted(c, "perform", "")

Commits(c) == Says(Commit, c, "commit", {"heard", "unheard"})

Other ==
    \/ \E c \in Callers :
        \/ GoesOn(c)
        \/ Says(Heartbeat, c, "heartbeat", Either)
        \/ Says(Release, c, "release", Either)
        \/ Says(Lapse, c, "lapse", Either)
        \/ ReleaseInTransaction(c) /\ Noted(c, "release in transaction", "stored")
        \/ Rollback(c) /\ Noted(c, "rollback", "")
        \/ EndInside(c, "commit") /\ Noted(c, "commit", "inside")
        \/ EndInside(c, "rollback") /\ Noted(c, "rollback", "inside")
        \/ Die(c) /\ Noted(c, "kill", "")
        \/ Again(c) /\ Noted(c, "again", "")
    \/ \E answer \in {"swept", "nothing"} : Sweep(answer) /\ Noted(Janitor, "sweep", answer)
    \/ CommitOf(Janitor) /\ Noted(Janitor, "commit", "heard")
    \/ (LeaseLapses \/ RetentionEnds) /\ Noted(None, "time", "")

Next == Other \/ \E c \in Callers : Commits(c)

\* A row lock is granted in the end, and a call does not look or wait for ever.
Sends(c)   == GoesOn(c) \/ Commit(c, "heard")
Returns(c) == Sends(c) /\ call'[c].at \in {"end", "done"}
Spec       == Init /\ [][Next]_vars /\ \A c \in Callers : SF_vars(Sends(c)) /\ SF_vars(Returns(c))

---------------------------- \* The promises

Answered(c) == call[c].by # None

\* One effect for each key and retention, unless the policy repeats the effect.
OneEffect == \A c \in Callers : Answered(c) /\ call[c].mode \notin Repeats => effects[call[c].life] = 1

\* No acknowledged effect is lost, and the record keeps the answer until its life ends.
NothingLost == \A c \in Callers : Answered(c) =>
    /\ effects[call[c].life] > 0 \/ HasSteps
    /\ \/ call[c].life < ended
       \/ record # None /\ record.life = call[c].life /\ record.done /\ record.by = call[c].by

\* In one life of the record, all callers get the answer of the same call, which had the same body.
OneAnswer == \A c, d \in Callers :
    Answered(c) /\ Answered(d) /\ call[c].life = call[d].life => call[c].by = call[d].by /\ call[c].body = call[d].body

\* A stale owner stores nothing: the owner of a lease writes over its own claim.
OnlyTheOwnerStores == \A c \in Callers :
    call[c].at = "commit" /\ lock # c /\ ~InTransaction(c) => record # None /\ record.token = call[c].token

\* A replay holds no lock in the transaction of a caller, which may be long.
ReplayHoldsNoLock == \A c \in Callers : call[c].at = "end" /\ InTransaction(c) => ~Answered(c)

EveryCallEnds == \A c \in Callers : call[c].at # "done" ~> call[c].at = "done"

---------------------------- \* What script/model asks for

Asks            == [mode: {"transaction", "at_most_once"}, body: {1, 2}] \cup [mode: {"at_least_once", "mark"}, body: {1}]
Few             == [mode: {"transaction", "at_least_once"}, body: {1}]
OnlyTransaction == [mode: {"transaction"}, body: {1}]
Symmetry        == Permutations(Callers)
=============================================================================

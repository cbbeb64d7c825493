------------------------------- MODULE Record -------------------------------
\* One key of pg-idempotency: its record, and the callers that claim it.
\*
\* Each action is one message to PostgreSQL, a fault, or time. A message has the name in the comment of its SQL: the
\* statement `pg_idempotency: take over` is the action TakeOver. The parameters are the actor and the server's answer.
\* PostgreSQL runs at READ COMMITTED: a statement sees what other transactions have committed, and what a transaction
\* has written appears at its COMMIT. An UPDATE that matches the committed row waits while another open transaction has
\* written the row. An UPDATE that does not match the row does not wait. A statement is one step here. In PostgreSQL,
\* another COMMIT can fall between the snapshot of a claim and its lock. DESIGN.md describes what can happen then, and
\* script/interleave tries it.
\*
\* There is one key, because no statement touches the record of another key. Time is two facts about a record: whether
\* its lease has lapsed, and whether its retention has ended. A life of the record ends when the record is deleted or
\* replaced because it has expired, or when the operator forgets the key.
EXTENDS Naturals, FiniteSets, TLC

CONSTANTS
    Callers,            \* The processes that call. A process may call again.
    Janitor, Operator,  \* The janitor deletes expired records. The operator settles what is in doubt (Steps.tla).
    Terms,              \* What a caller may ask for: a set of records of a mode and a body.
    Ends, Beats,        \* At most how many lives end, and how often the owner of a claim renews its lease: bounds.
    None, Deleted       \* No record, or nobody. What a transaction has written that deletes the record.
VARIABLES
    record,   \* The committed record of the key (NewRow has its fields), or None.
    written,  \* For each actor: the columns that its open transaction has written, or Deleted, or None.
    lock,     \* The caller whose transaction holds the advisory lock of the key, or None.
    call,     \* For each caller: its call (Called has the fields).
    effects,  \* For each life of the record: how often the operation and each step took effect, up to 2.
    ended,    \* How many lives have ended.
    shown     \* What the operator has seen of the record (Steps.tla), or None.

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

---------------------------- \* What the actions share
\* The committed record after a COMMIT of this actor. An UPDATE changes only the columns that it sets.
After(a) == CASE written[a] = None    -> record
              [] written[a] = Deleted -> None
              [] OTHER                -> IF record = None THEN written[a] ELSE written[a] @@ record

CanLock(c)   == lock \in {None, c}
Unwritten(a) == \* No other open transaction has written the row. A heartbeat has a transaction of its own.
    (\A b \in Actors \ {a} : written[b] = None) /\ \A c \in Callers : ~call[c].beat

\* A token is drawn at random, and so is new. Here, its actor is a part of it.
Fresh(a) ==
    LET Of(row) == IF row = None THEN None ELSE row.token
        used    == UNION ({{call[c].token, call[c].by} : c \in Callers} \cup {{Of(After(b))} : b \in Actors})
    IN  CHOOSE t \in {a} \X (1..(3 * Cardinality(Actors))) : t \notin used \cup {Of(record), Of(shown)}

NewRow(c, life) ==
    [mode |-> call[c].mode, body |-> call[c].body,
     token   |-> Fresh(c),  \* Of the last claim or decision.
     life    |-> life, expired |-> FALSE,
     lease   |-> IF call[c].mode \in Leased THEN "live" ELSE "none",  \* Or "lapsed", or "released".
     beats   |-> 0,         \* How often the lease was renewed.
     steps   |-> NoSteps,   \* Each is "new", "begun" or "done".
     done    |-> call[c].mode = "mark"]

Called(asks) ==
    [mode |-> asks.mode, body |-> asks.body,
     at    |-> "claim",  \* Its next message, or "perform", "sending", "sent", "failed", "end" of transaction, "done".
     then  |-> "done",   \* Where the call goes on after its COMMIT.
     token |-> None,     \* The token that it has found or drawn.
     beat  |-> FALSE,    \* Whether its heartbeat has written the row.
     life  |-> 0,        \* Of its claim, or of its answer.
     by    |-> None]     \* The token of the claim or decision whose response it got, or None.

Go(c, place)     == call' = [call EXCEPT ![c].at = place, ![c].then = "done"]
Write(a, row)    == written' = [written EXCEPT ![a] = row]
Count(c, effect) == effects' = [effects EXCEPT ![call[c].life][effect] = IF @ = 2 THEN 2 ELSE @ + 1]

\* The call has a response, or is refused. Its transaction still has to end if it holds the lock.
End(c, place, by, life) == call' = [call EXCEPT ![c] = [Called(@) EXCEPT !.at = place, !.by = by, !.life = life]]
Leave(c, by, life) == End(c, IF lock = c THEN "end" ELSE "done", by, life)
Replay(c)          == Leave(c, record.token, record.life)
Refuse(c)          == Leave(c, None, 0)

TryAgain(c, place)  == call' = [call EXCEPT ![c].at = place, ![c].token = None]
Wait(c)             == TryAgain(c, "await") \/ Refuse(c)  \* An open transaction has the key: OnDuplicate decides.
LookAgain(c)        == TryAgain(c, "look") \/ Refuse(c)   \* After ten looks without a wait, the call is told InFlight.
CommitThen(c, then) == call' = [call EXCEPT ![c].at = "commit", ![c].then = then]

\* The statement has won the claim, and holds the lock. The claim of a lease commits at once, and then the work begins.
NextStep(steps) == IF steps.pay = "new" THEN "pay" ELSE IF steps.send = "new" THEN "send" ELSE "complete lease"
Win(c, row) ==
    /\ lock' = c /\ Write(c, row) /\ UNCHANGED <<record, effects, rest>>
    /\ call' = [call EXCEPT ![c].token = row.token, ![c].life = row.life,
                            ![c].at   = IF row.mode = "transaction" THEN "complete" ELSE "commit",
                            ![c].then = CASE row.mode = "in_steps" -> NextStep(row.steps)
                                          [] row.lease = "live"    -> "perform"
                                          [] OTHER                 -> "done"]

---------------------------- \* The messages of a claim
\* insert … where not exists (the record) and pg_try_advisory_xact_lock(…) on conflict do nothing
Claim(c, answer) ==
    /\ call[c].at = "claim"
    /\ \/ answer = "won"     /\ record = None /\ CanLock(c) /\ Unwritten(c) /\ Win(c, NewRow(c, ended))
       \/ answer = "nothing" /\ (record # None \/ ~CanLock(c))
                             /\ Go(c, "look") /\ UNCHANGED <<record, written, lock, effects, rest>>

\* select the response for a replay, or else the record, or else pg_try_advisory_xact_lock(…)
Look(c, answer) ==
    /\ call[c].at = "look" /\ UNCHANGED <<record, written, effects, rest>>
    /\ \/ /\ record # None /\ answer = Answer(record, call[c]) /\ UNCHANGED lock
          /\ CASE answer \in {"take over", "take over as new"} ->
                  call' = [call EXCEPT ![c].at = answer, ![c].token = record.token]
               [] answer = "replayed" -> Replay(c)
               [] OTHER -> Refuse(c)
       \/ answer = "free" /\ record = None /\ CanLock(c) /\ lock' = c /\ Go(c, "claim")
       \/ answer = "held" /\ record = None /\ ~CanLock(c) /\ UNCHANGED lock /\ Wait(c)

\* update … where token = the one that the look saw, and the record may still be taken over: under the lock, and without
\* a wait for the row. A first attempt takes over only what is expired or released: a record that has become live and
\* has lapsed since the look may be of another mode or body.
TakeOver(c, answer) ==
    LET again == call[c].at = "take over"
        due   == (~again /\ Expired(record)) \/ (Retriable(record) /\ (again \/ record.lease = "released"))
        row   == NewRow(c, IF ~again /\ Expired(record) THEN ended + 1 ELSE ended) IN
    /\ call[c].at \in {"take over", "take over as new"} /\ UNCHANGED <<record, effects, rest>>
    /\ answer = CASE record = None \/ record.token # call[c].token -> "changed"
                  [] ~CanLock(c)   -> "held"
                  [] ~Unwritten(c) -> "locked"
                  [] ~due          -> "kept"
                  [] OTHER         -> "won"
    /\ IF answer = "won"
       THEN Win(c, [row EXCEPT !.steps = IF again THEN record.steps ELSE NoSteps])
       ELSE /\ lock' = (IF answer \in {"locked", "kept"} THEN c ELSE lock) /\ UNCHANGED written
            /\ IF answer = "held" THEN Wait(c) ELSE LookAgain(c)

\* select idempotency.await_key(…): waits for the lock, for a limited time
Await(c, answer) ==
    /\ call[c].at = "await" /\ UNCHANGED <<record, written, effects, rest>>
    /\ \/ answer = "claim"   /\ CanLock(c) /\ record = None /\ lock' = c /\ Go(c, "claim")
       \/ /\ answer = "look" /\ CanLock(c) /\ record # None /\ Go(c, "look")
          /\ lock' = IF Expired(record) \/ (Retriable(record) /\ record.mode = call[c].mode) THEN c ELSE lock
       \/ answer = "timeout" /\ ~CanLock(c) /\ UNCHANGED lock /\ Go(c, "look")

---------------------------- \* The messages of a call in transaction mode. Its effect appears with its COMMIT.
InTransaction(c) == call[c].mode \notin Leased

\* update … where token = mine and claimed_at = now(): only in the transaction of the claim
InClaim(c, answer, columns) ==
    /\ call[c].at = "complete" /\ UNCHANGED <<record, lock, effects, rest>>
    /\ \/ answer = "stored"  /\ written[c] # None /\ Write(c, columns @@ written[c]) /\ CommitThen(c, "done")
       \/ answer = "nothing" /\ written[c] = None /\ UNCHANGED written /\ Refuse(c)

\* The work has succeeded. Or it has failed behind a savepoint, and its effect is undone.
Complete(c, answer)             == InClaim(c, answer, [done |-> TRUE])
ReleaseInTransaction(c, answer) == InClaim(c, answer, [lease |-> "released", token |-> Fresh(c)])

---------------------------- \* The messages of the owner of a lease, each in a transaction of its own
Owns(c)   == record # None /\ record.token = call[c].token /\ ~record.done
IsLive(c) == Owns(c) /\ record.lease = "live"  \* The clock of the owner ends a lease no later than that of the server.

\* The effect in the outside world. The owner causes it only under a live lease.
Perform(c) ==
    /\ call[c].at = "perform" /\ UNCHANGED <<record, written, lock, rest>>
    /\ IF IsLive(c) THEN Count(c, "perform") /\ Go(c, "complete lease") ELSE UNCHANGED effects /\ Refuse(c)

\* update … where token = mine and completed_at is null. Without a row, the claim is gone, or the owner's own response
\* is there, because its COMMIT got no answer.
Update(c, answer, due, columns, then) ==
    /\ UNCHANGED <<record, lock, effects, rest>>
    /\ \/ answer = "stored"  /\ due /\ Unwritten(c) /\ Write(c, columns) /\ CommitThen(c, then)
       \/ answer = "nothing" /\ UNCHANGED written /\ ~due
          /\ IF record # None /\ record.token = call[c].token /\ record.done THEN Replay(c)
             ELSE IF call[c].at \in {"pay", "send", "sent"} THEN Go(c, "failed") ELSE Refuse(c)

Completed == [done |-> TRUE, lease |-> "none", steps |-> NoSteps, expired |-> FALSE]
CompleteLease(c, answer) == call[c].at = "complete lease" /\ Update(c, answer, Owns(c), Completed, "done")

\* A task of its own sends it. After "nothing", the owner learns at its next statement that the claim is gone.
Heartbeat(c, answer) ==
    /\ call[c].at \in {"perform", "pay", "send", "sending", "sent", "complete lease"} /\ ~call[c].beat
    /\ \/ answer = "stored"  /\ Owns(c) /\ Unwritten(None) /\ record.beats < Beats
                             /\ call' = [call EXCEPT ![c].beat = TRUE]
       \/ answer = "nothing" /\ ~Owns(c) /\ UNCHANGED call
    /\ UNCHANGED <<record, written, lock, effects, rest>>
CommitBeat(c) ==
    /\ call[c].beat /\ call' = [call EXCEPT ![c].beat = FALSE] /\ UNCHANGED <<written, lock, effects, rest>>
    /\ record' = [record EXCEPT !.lease = "live", !.expired = FALSE, !.beats = @ + 1]

\* The work has failed, and certainly has had no effect that must not be repeated.
Release(c, answer) ==
    /\ \/ call[c].at \in {"perform", "pay", "send", "failed"}
       \/ call[c].at = "complete lease" /\ call[c].mode \in Repeats
    /\ Update(c, answer, Owns(c), [lease |-> "released", token |-> Fresh(c)], "done")

\* The work has failed, and may have had such an effect.
Lapse(c, answer) ==
    /\ call[c].at \in {"sending", "sent", "failed"} \/ (call[c].at = "complete lease" /\ call[c].mode = "at_most_once")
    /\ Update(c, answer, Owns(c), [lease |-> "lapsed", token |-> Fresh(c), expired |-> FALSE], "done")

---------------------------- \* The ends of transactions, faults and time
Unlock(a) == lock' = IF lock = a THEN None ELSE lock
Vanish(a) == Write(a, None) /\ Unlock(a) /\ UNCHANGED <<record, rest>>
Appear(a) == /\ record' = After(a) /\ Write(a, None) /\ Unlock(a) /\ UNCHANGED shown
             /\ ended' = CASE written[a] = None    -> ended
                           [] written[a] = Deleted -> IF a = Operator \/ Expired(record) THEN ended + 1 ELSE ended
                           [] OTHER                -> After(a).life

\* In transaction mode, the effect appears with the response, and the effect of the step `pay` with its result. If the
\* caller does not hear of its COMMIT, the owner of a lease stores its response once more.
Commit(c, answer) ==
    LET row == After(c) IN
    /\ call[c].at \in {"commit", "end"} /\ Appear(c)
    /\ IF written[c] # None /\ InTransaction(c) /\ row.done THEN Count(c, "perform")
       ELSE IF written[c] # None /\ record # None /\ record.steps.pay # row.steps.pay /\ row.steps.pay = "done"
       THEN Count(c, "pay") ELSE UNCHANGED effects
    /\ CASE call[c].at = "end" -> answer = "heard" /\ Go(c, "done")
         [] answer = "unheard" -> End(c, "done", None, 0) \/ (~InTransaction(c) /\ row.done /\ Go(c, "complete lease"))
         [] call[c].then # "done" -> Go(c, call[c].then)
         [] OTHER -> IF row.done THEN End(c, "done", call[c].token, call[c].life) ELSE End(c, "done", None, 0)

\* The janitor deletes a record, and skips a row that another transaction has written.
Sweep(answer) ==
    /\ written[Janitor] = None /\ UNCHANGED <<record, lock, call, effects, rest>>
    /\ IF record # None /\ Expired(record) /\ Unwritten(Janitor)
       THEN answer = "swept" /\ Write(Janitor, Deleted) ELSE answer = "nothing" /\ UNCHANGED written
CommitOf(a) == a \in {Janitor, Operator} /\ written[a] # None /\ Appear(a) /\ UNCHANGED <<call, effects>>

\* The caller rolls back, or the process or its connection is gone. What it has not committed vanishes.
Die(c) == call[c].at # "done" /\ Vanish(c) /\ End(c, "done", None, 0) /\ UNCHANGED effects

\* The lease lapses, and the retention ends, at any moment. A statement may begin both again.
Becomes(row)  == record' = row /\ UNCHANGED <<written, lock, call, effects, rest>>
LeaseLapses   == record # None /\ record.lease = "live" /\ Becomes([record EXCEPT !.lease = "lapsed"])
RetentionEnds == record # None /\ ~record.expired /\ record.life < Ends /\ Becomes([record EXCEPT !.expired = TRUE])

---------------------------- \* The promises
Answered(c) == call[c].by # None

\* One effect in each life of the record, unless the policy repeats the effect.
OneEffect ==
    /\ \A c \in Callers : Answered(c) /\ call[c].mode \notin Repeats => effects[call[c].life].perform = 1
    /\ record # None /\ record.mode \notin Repeats => effects[record.life].perform <= 1

\* No acknowledged effect is lost, and the record keeps the response until its life ends.
NothingLost == \A c \in Callers : Answered(c) =>
    /\ \E effect \in {"perform", "pay", "send"} : effects[call[c].life][effect] > 0
    /\ call[c].life < ended \/ (record # None /\ record.done /\ record.token = call[c].by)

\* In one life of the record, all callers get the response of the same call, which had the same body.
Share(c, d) == Answered(c) /\ Answered(d) /\ call[c].life = call[d].life
OneAnswer   == \A c, d \in Callers : Share(c, d) => call[c].by = call[d].by
SameBody    == \A c, d \in Callers : Share(c, d) => call[c].body = call[d].body

\* A stale owner stores nothing: the owner of a lease, and its heartbeat, write over its own claim.
OnlyTheOwnerStores == \A c \in Callers : (call[c].at = "commit" /\ lock # c /\ ~InTransaction(c)) \/ call[c].beat =>
    record # None /\ record.token = call[c].token

\* A replay holds no lock in the transaction of a caller, which may be long.
ReplayHoldsNoLock == \A c \in Callers : InTransaction(c) /\ lock = c => ~Answered(c)

EveryCallEnds == \A c \in Callers : call[c].at # "done" ~> call[c].at = "done"
=============================================================================

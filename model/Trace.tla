-------------------------------- MODULE Trace --------------------------------
(* Whether Steps.tla allows what the actors of script/interleave have seen.  *)
(* The traces are a tree of events. An event is the actor, the statement,    *)
(* the server's answer and, where all actors rest, the committed record and  *)
(* the holders of the lock.                                                  *)
EXTENDS Traces, Coverage

VARIABLE at   \* The event of the tree that has happened last.

(* What the monitor sees of a record. Marks have no response.                *)
Same(r, seen) ==
    IF seen = None \/ r = None THEN seen = None /\ r = None
    ELSE /\ <<r.mode, r.done, r.expired, r.lease, r.body>> = <<seen.mode, seen.done, seen.expired, seen.lease, seen.body>>
         /\ r.done \/ r.steps = seen.steps
         /\ r.mode = "in_steps" \/ seen.by = None \/ r.by = seen.by  \* The response of steps names no call.

(* The events without an action here change nothing.                         *)
Silent == {"nothing", "pause", "ask", "has stored", "read steps", "read request", "store request", "candidates"}
IsIdle(actor, message, answer) ==
    \/ message \in Silent
    \/ message = "read" /\ (shown # None \/ written[Operator] # None \/ answer = "nothing")
    \/ message \in {"commit", "rollback"} /\ written[actor] = None /\ lock # actor
    \/ message = "kill" /\ call[actor].at = "done"

(* The clock's message moves past the retention, the lease, or both.         *)
Clock == \/ LeaseLapses \/ RetentionEnds \/ UNCHANGED vars
         \/ /\ record # None /\ record' = [record EXCEPT !.expired = TRUE, !.lease = IF @ = "live" THEN "lapsed" ELSE @]
            /\ ended' = ended + 1 /\ UNCHANGED <<written, lock, call, effects, shown>>

(* Instead of Noted: an action of the specification is the next event. The   *)
(* server does not know whether a caller has heard of its COMMIT, and what a *)
(* process dies of. A look does not show what it means, unless the call ends.*)
IsNext(actor, message, answer) ==
    LET event == Nodes[at'] IN
    /\ event[1] = actor
    /\ \/ message = event[2] /\ (answer = event[3] \/ event[3] = "" \/ event[3] = "heard"
                                \/ (event[3] = "found" /\ answer \in Answers))
       \/ message = "kill" /\ event[2] = "rollback"
    /\ Covered(actor, event[2], answer)
AnyDecision(decision) == TRUE   (* Instead of IsRight: operators err. *)

(* Between two statements, a call works, or a step is not its own.           *)
Unheard(c) ==
    \/ Perform(c) /\ UNCHANGED steps
    \/ Send(c)
    \/ call[c].at = "pay"  /\ UNCHANGED <<record, written, lock, effects, rest, steps>> /\ (Go(c, "send") \/ Go(c, "perform"))
    \/ call[c].at = "send" /\ UNCHANGED <<record, written, lock, effects, rest, steps>> /\ Go(c, "complete")

Start(seen) == IF seen = None THEN None
    ELSE [mode |-> seen.mode, body |-> seen.body, token |-> 1, life |-> 0, expired |-> seen.expired, lease |-> seen.lease,
          beats |-> 0, steps |-> seen.steps, done |-> seen.done, by |-> seen.by]

TraceInit == \E root \in Roots :
    LET start == root.start
        first == Nodes[root.node] IN
    /\ at = root.node
    /\ first[2] = "nothing"
    /\ record = Start(start.record) /\ ended = IF record # None /\ record.expired THEN 1 ELSE 0
    /\ call = [c \in Callers |-> IF c \in DOMAIN start.asks THEN Called(start.asks[c])
                                 ELSE Called([mode |-> "mark", body |-> 1])]
    /\ written = [a \in Actors |-> None] /\ lock = None /\ shown = None
    /\ effects = [life \in 0..Ends |-> 0] /\ paid = effects /\ sent = effects

TraceNext ==
    \/ \E next \in Nodes[at][5] :
        LET event == Nodes[next] IN
        /\ at' = next
        /\ IF event[1] = "clock" THEN Clock /\ UNCHANGED steps
           ELSE IF IsIdle(event[1], event[2], event[3]) THEN UNCHANGED allVars
           ELSE StepsNext
        /\ event[4] = None \/ (Same(record', event[4].record) /\ event[4].locks = {lock'} \ {None})
    \/ \E c \in Callers : Unheard(c) /\ UNCHANGED at

TraceSpec == TraceInit /\ [][TraceNext]_<<allVars, at>>

(* Prints each event that was reached. The others are not allowed.           *)
Reached == PrintT(<<"reached", at>>)
=============================================================================

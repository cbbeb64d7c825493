-------------------------------- MODULE Trace --------------------------------
(* Whether Check.tla allows what the actors of script/interleave have seen.  *)
(* The traces are a tree of events. An event is the actor, the statement,    *)
(* the server's answer and, where all actors rest, the committed record and  *)
(* the holders of the lock.                                                  *)
EXTENDS Traces, Check, Coverage

VARIABLE at   \* The event of the tree that has happened last.

(* What the monitor sees of a record. Marks have no response.                *)
Same(r, seen) ==
    IF seen = None \/ r = None THEN seen = None /\ r = None
    ELSE /\ <<r.mode, r.body, r.done>> = <<seen.mode, seen.body, seen.done>>
         /\ <<r.expired, r.lease>> = <<seen.expired, seen.lease>>
         /\ r.done \/ r.steps = seen.steps
         /\ r.mode = "in_steps" \/ seen.by = None \/ r.token[1] = seen.by  \* The response of steps names no call.

(* The events without an action here change nothing. If a response is read,  *)
(* the event is a look.                                                      *)
Silent == {"nothing", "response", "pause", "ask", "has stored", "read steps", "read request", "store request", "candidates"}
IsIdle(actor, message, answer) ==
    \/ message \in Silent
    \/ message = "read" /\ (shown # None \/ written[Operator] # None \/ answer = "nothing")
    \/ message \in {"commit", "rollback"} /\ written[actor] = None /\ lock # actor
       /\ (actor \in Callers => ~call[actor].beat)
    \/ message = "kill" /\ call[actor].at = "done"

(* The clock's message moves past the retention, the lease, or both. It      *)
(* writes the end of the lease, so the record is not as it was shown.        *)
Clock == \/ RetentionEnds \/ UNCHANGED vars
         \/ /\ record # None /\ record.lease = "live"
            /\ \E ends \in {record.expired, TRUE} :
                   Becomes([record EXCEPT !.expired = ends, !.lease = "lapsed", !.beats = @ + 1])

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
    \/ Perform(c)
    \/ Send(c)
    \/ /\ UNCHANGED <<record, written, lock, effects, rest>>
       /\ \/ call[c].at = "pay"  /\ (Go(c, "send") \/ Go(c, "perform"))
          \/ call[c].at = "send" /\ Go(c, "complete lease")

Start(seen) == IF seen = None THEN None
    ELSE [mode |-> seen.mode, body |-> seen.body, token |-> <<seen.by, 0>>, life |-> 0, expired |-> seen.expired,
          lease |-> seen.lease, beats |-> 0, steps |-> seen.steps, done |-> seen.done]

TraceInit == \E root \in Roots :
    LET start == root.start
        first == Nodes[root.node] IN
    /\ at = root.node
    /\ first[2] = "nothing"
    /\ record = Start(start.record)
    /\ call = [c \in Callers |-> IF c \in DOMAIN start.asks THEN Called(start.asks[c])
                                 ELSE Called([mode |-> "mark", body |-> 1])]
    /\ Begins

TraceNext ==
    \/ \E next \in Nodes[at][5] :
        LET event == Nodes[next] IN
        /\ at' = next
        /\ IF event[1] = "clock" THEN Clock ELSE IF IsIdle(event[1], event[2], event[3]) THEN UNCHANGED vars ELSE Next
        /\ event[4] = None \/ (Same(record', event[4].record) /\ event[4].locks = {lock'} \ {None})
    \/ \E c \in Callers : Unheard(c) /\ UNCHANGED at

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, at>>

(* Prints each event that was reached. The others are not allowed.           *)
Reached == PrintT(<<"reached", at>>)
=============================================================================

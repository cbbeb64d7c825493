-------------------------------- MODULE Trace --------------------------------
(* Whether Steps.tla allows what the actors of script/interleave have seen.  *)
(* The traces are a tree of events. An event is the actor, the statement,    *)
(* the server's answer and, where all actors rest, the committed record and  *)
(* the holders of the lock.                                                  *)
EXTENDS Traces

VARIABLE at   \* The event of the tree that has happened last.

(* What the monitor sees of a record. Marks have no response.                *)
Same(r, seen) ==
    IF seen = None \/ r = None THEN seen = None /\ r = None
    ELSE /\ <<r.mode, r.done, r.expired, r.lease, r.body>> = <<seen.mode, seen.done, seen.expired, seen.lease, seen.body>>
         /\ r.done \/ r.steps = seen.steps
         /\ r.mode = "in_steps" \/ seen.by = None \/ r.by = seen.by  \* The response of steps names no call.

(* The events without an action here change nothing.                         *)
Idle == UNCHANGED allVars
Silent == {"nothing", "pause", "ask", "has stored", "read steps", "read request", "store request", "candidates"}

HasNothing(c) == written[c] = None /\ lock # c  \* The end of its transaction changes nothing.

Clock == \/ LeaseLapses \/ RetentionEnds \/ Idle
         \/ /\ record # None /\ record' = [record EXCEPT !.expired = TRUE, !.lease = IF @ = "live" THEN "lapsed" ELSE @]
            /\ ended' = ended + 1 /\ UNCHANGED <<written, lock, call, effects, shown>>

Happened(actor, message, answer) ==
    CASE message \in Silent -> Idle
      [] actor = "clock"    -> Clock /\ UNCHANGED steps
      [] actor = "janitor"  -> IF message = "sweep" THEN Sweep(answer) /\ UNCHANGED steps
                               ELSE IF written[Janitor] = None THEN Idle ELSE CommitOf(Janitor) /\ UNCHANGED steps
      [] actor = "operator" ->
            CASE message = "read" -> IF shown # None \/ written[Operator] # None \/ answer = "nothing" THEN Idle ELSE Show
              [] message = "resolve"            -> Resolve(answer)
              [] message = "release unperformed" -> ReleaseUnperformed(answer)
              [] message = "settle step"        -> SettleStep(answer)
              [] message = "release step"       -> ReleaseStep(answer)
              [] message = "forget"             -> Forget(answer)
              [] OTHER -> IF written[Operator] = None THEN Idle ELSE CommitOf(Operator) /\ UNCHANGED steps
      [] OTHER ->
            CASE message = "finish step" -> FinishStep(actor, answer)
              [] message = "begin step"  -> BeginStep(actor, answer)
              [] OTHER -> /\ UNCHANGED steps
                          /\ CASE message = "claim"          -> Claim(actor, answer)
                               [] message = "look"           -> IF answer = "found" THEN \E told \in Answers : Look(actor, told)
                                                                ELSE IF answer = "take over" THEN Look(actor, answer) \/ Look(actor, "take over as new")
                                                                ELSE Look(actor, answer)
                               [] message = "take over"      -> TakeOver(actor, answer)
                               [] message = "await"          -> Await(actor, answer)
                               [] message = "complete"       -> Complete(actor, answer)
                               [] message = "complete lease" -> CompleteLease(actor, answer)
                               [] message = "heartbeat"      -> Heartbeat(actor, answer)
                               [] message = "release"        -> Release(actor, answer)
                               [] message = "lapse"          -> Lapse(actor, answer)
                               [] message = "release in transaction" -> ReleaseInTransaction(actor)
                               [] message = "commit" /\ answer = "committed" ->
                                    IF HasNothing(actor) THEN Idle
                                    ELSE Commit(actor) \/ CommitUnheard(actor) \/ EndInside(actor, "commit")
                               [] message \in {"rollback", "commit"} ->
                                    IF HasNothing(actor) THEN Idle
                                    ELSE Rollback(actor) \/ Die(actor) \/ EndInside(actor, "rollback")
                               [] message = "kill" -> IF call[actor].at = "done" THEN Idle ELSE Die(actor)
                               [] OTHER -> FALSE

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
        /\ Happened(event[1], event[2], event[3])
        /\ at' = next
        /\ event[4] = None \/ (Same(record', event[4].record) /\ event[4].locks = {lock'} \ {None})
    \/ \E c \in Callers : Unheard(c) /\ UNCHANGED at

TraceSpec == TraceInit /\ [][TraceNext]_<<allVars, at>>

(* Prints each event that was reached. The others are not allowed.           *)
Reached == PrintT(<<"reached", at>>)
=============================================================================

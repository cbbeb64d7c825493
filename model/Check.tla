-------------------------------- MODULE Check --------------------------------
\* All actors together, and what script/model checks: the messages of each actor, fairness, and what the callers ask for
\* in each configuration.
EXTENDS Steps

CONSTANT Bodies

Begins == /\ written = [a \in Actors |-> None] /\ lock = None /\ ended = 0 /\ shown = None
          /\ effects = [life \in 0..Ends |-> [perform |-> 0, pay |-> 0, send |-> 0]]
Init   == Begins /\ record = None /\ call \in [Callers -> {Called(asks) : asks \in Terms}]

\* A mistake: `perform` ends the transaction of the claim, and goes on.
EndInside(c, how) ==
    /\ call[c].at = "complete" /\ written[c] # None /\ UNCHANGED call
    /\ \/ how = "commit"   /\ Appear(c) /\ Count(c, "perform")
       \/ how = "rollback" /\ Vanish(c) /\ UNCHANGED effects

Again(c) == /\ call[c].at = "done" /\ call' = [call EXCEPT ![c] = Called(@)]
            /\ UNCHANGED <<record, written, lock, effects, rest>>

\* The actor sends this message, and the server gives one of these answers. Coverage.tla and Trace.tla replace Noted.
Noted(actor, message, answer) == TRUE
Says(Action(_, _), actor, message, answers) ==
    \E answer \in answers : Action(actor, answer) /\ Noted(actor, message, answer)
Either    == {"stored", "nothing"}
Decisions == {"resolve", "release unperformed", "settle step", "release step", "forget"}
Answers   == {"take over as new", "take over", "replayed", "InFlight", "KeyReused", "OtherMode", "Indeterminate"}

\* What a caller does by itself, but for its COMMIT.
GoesOn(c) ==
    \/ Says(Claim, c, "claim", {"won", "nothing"})
    \/ Says(Look, c, "look", Answers \cup {"free", "held"})
    \/ Says(TakeOver, c, "take over", {"changed", "held", "locked", "kept", "won"})
    \/ Says(Await, c, "await", {"claim", "look", "timeout"})
    \/ Says(Complete, c, "complete", Either)
    \/ Says(CompleteLease, c, "complete lease", Either)
    \/ Says(FinishStep, c, "finish step", Either)
    \/ Says(BeginStep, c, "begin step", Either)
    \/ Perform(c) /\ Noted(c, "perform", "")
    \/ Send(c) /\ Noted(c, "send", "")

\* An operator who makes no mistake looks while no owner works, because an owner may still cause the effect. The
\* decision is right as of what was shown. To forget a key is right if a new life is.
IsRight(verb) ==
    CASE verb = "read" -> record.lease # "live" /\ (~record.done \/ ended < Ends)
      [] verb = "forget" -> ended < Ends
      [] verb \in {"settle step", "release step"} -> InDoubt(shown) /\ shown.took = (verb = "settle step")
      [] OTHER -> ~InDoubt(shown) /\ (shown.took /\ shown.mode # "in_steps") = (verb = "resolve")

Shows   == record # None /\ IsRight("read") /\ Show /\ Noted(Operator, "read", "row")
Decides == \E decision \in Decisions, answer \in Either :
               shown # None /\ IsRight(decision) /\ Settle(decision, answer) /\ Noted(Operator, decision, answer)

Next ==
    \/ \E c \in Callers :
        \/ GoesOn(c)
        \/ Says(Commit, c, "commit", {"heard", "unheard"})
        \/ Says(Heartbeat, c, "heartbeat", Either)
        \/ CommitBeat(c) /\ Noted(c, "commit", "heard")
        \/ Says(Release, c, "release", Either)
        \/ Says(Lapse, c, "lapse", Either)
        \/ Says(ReleaseInTransaction, c, "release in transaction", {"stored"})
        \/ EndInside(c, "commit") /\ Noted(c, "commit", "inside")
        \/ EndInside(c, "rollback") /\ Noted(c, "rollback", "inside")
        \/ Die(c) /\ Noted(c, "kill", "")
        \/ Again(c) /\ Noted(c, "again", "")
    \/ \E answer \in {"swept", "nothing"} : Sweep(answer) /\ Noted(Janitor, "sweep", answer)
    \/ Shows \/ Decides
    \/ \E a \in {Janitor, Operator} : CommitOf(a) /\ Noted(a, "commit", "heard")
    \/ (LeaseLapses \/ RetentionEnds) /\ Noted(None, "time", "")

\* A row lock is granted in the end, and a call does not look or wait for ever. An owner that has failed says so.
Sends(c)   == GoesOn(c) \/ Commit(c, "heard") \/ Lapse(c, "stored") \/ Lapse(c, "nothing")
Returns(c) == Sends(c) /\ call'[c].at \in {"end", "done"}

\* The operator works. A transaction that only has to commit needs no more than weak fairness, which TLC checks sooner.
Spec == /\ Init /\ [][Next]_vars /\ WF_vars(Shows) /\ WF_vars(Decides)
        /\ \A a \in {Janitor, Operator} : WF_vars(CommitOf(a))
        /\ \A c \in Callers : SF_vars(Sends(c)) /\ SF_vars(Returns(c)) /\ WF_vars(CommitBeat(c))

\* Without an operator: instead of IsRight.
Nobody(verb) == FALSE

\* What the callers ask for. A mark has no body.
Asks(modes) == [mode: modes \ {"mark"}, body: Bodies] \cup [mode: modes \cap {"mark"}, body: {None}]
Modes       == {"transaction", "mark"} \cup Leased
AllButSteps == Asks(Modes \ {"in_steps"})
Few         == Asks({"transaction", "at_least_once"})
Transaction == Asks({"transaction"})
Once        == Asks({"at_most_once"})
InSteps     == Asks({"in_steps"})
InDoubts    == Asks({"in_steps", "at_most_once"})
Repeating   == Asks(Repeats)
Symmetry    == Permutations(Callers) \cup Permutations(Bodies)
=============================================================================

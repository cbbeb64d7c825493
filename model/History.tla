------------------------------- MODULE History -------------------------------
\* Whether Check.tla allows what the callers of script/chaos have seen. A caller sees when its call begins and returns,
\* and the result. TLC searches for the messages between.
\*
\* Histories.tla contains a history for each key: the mode, the number of effects that the database contains at the end,
\* each call, and the events. The first event of a call is its begin, and the second one its return. A call whose result
\* is unknown never returns: it may go on, or may be dead. Of a call, a history has the `end`, the call `of` which it
\* got the answer, and whether a row says that the call had the `effect`.
EXTENDS Histories, Check, Sequences

VARIABLES which, lie, at   \* The history, what is changed in it, and how many of its events have happened.

Mode   == Histories[which].mode
Calls  == Histories[which].calls
Events == Histories[which].events

\* TLC also tries each history with a change, which the specification has to refuse: a replay becomes a second call that
\* performs, has an answer that belongs to no call, or has another body than the call that performed.
Those(history, end) == {c \in DOMAIN history.calls : history.calls[c].end = end}
Lies(h) == IF {} \in {Those(Histories[h], "performed"), Those(Histories[h], "replayed")} THEN {"none"}
           ELSE {"none", <<"performs", "nobody", "body">>[1 + (h % 3)]}
Told(c) ==
    IF lie = "none" \/ c # CHOOSE liar \in Those(Histories[which], "replayed") : TRUE THEN Calls[c]
    ELSE CASE lie = "performs" -> [Calls[c] EXCEPT !.end = "performed", !.of = c, !.effect = TRUE]
           [] lie = "nobody"   -> [Calls[c] EXCEPT !.of = "no call"]
           [] lie = "body"     -> [Calls[c] EXCEPT !.body = 2]
Effects == Histories[which].effects + IF lie = "performs" THEN 1 ELSE 0

Begun(c) == \E event \in 1..at : Events[event] = c

---------------------------- \* What is hidden

\* A history is allowed if TLC finds one behavior with its events. So the search leaves out behaviors that permit no
\* other result. An actor reaches one of these places before another actor acts. No call waits, and each COMMIT is
\* answered. A process is killed only where the kill unlocks the key or ends the call.
Places == {"claim", "perform", "complete", "complete lease", "done"}
Busy   == {c \in Callers : call[c].at \notin Places \/ call[c].beat}
          \cup (IF shown = None /\ written[Operator] = None THEN {} ELSE {Operator})

\* The calls that can get their result now. They get it first, because this changes nothing for other calls.
Sees(c) == LET told == Told(c) IN
    IF record = None THEN told.end = "in flight" /\ ~CanLock(c)
    ELSE <<told.end, Answer(record, call[c])>>
             \in {<<"in flight", "InFlight">>, <<"indeterminate", "Indeterminate">>, <<"replayed", "replayed">>}
Seers == {c \in DOMAIN Calls : Begun(c) /\ call[c].at = "claim" /\ Sees(c)}

\* Whether a caller does this, if its call ends so.
Suits(c, message, answer) ==
    LET told   == Told(c)
        ends   == call'[c].at = "done"
        by     == IF call'[c].by = None THEN None ELSE call'[c].by[1]   \* The actor of this token.
        fails  == told.end \in {"failed", "unknown"}
    IN
    /\ CASE message = "claim" -> TRUE
         [] message = "look" -> told.end = "in flight" => answer \notin {"Indeterminate", "KeyReused", "OtherMode"}
         [] message = "take over" -> TRUE
         [] message = "perform" -> told.effect /\ ~ends
         [] message \in {"complete", "complete lease"} -> told.effect /\ answer = "stored"
         [] message = "commit" -> answer = "heard"
         [] message = "kill" -> fails /\ call[c].at \in Places
                                /\ (told.effect => call[c].at = "complete lease")
                                /\ (told.end = "unknown" => lock = c)
         [] message = "release" -> Mode = "at_most_once" /\ fails /\ ~told.effect /\ answer = "stored"
         \* A suspended owner renews its lease after another caller has been told that the key is indeterminate.
         [] message = "heartbeat" -> Mode = "at_most_once" /\ answer = "stored" /\ record.lease = "lapsed"
                                     /\ \E d, e \in DOMAIN Calls :
                                            /\ Told(d).end = "indeterminate" /\ call[d].at = "done"
                                            /\ Told(e).end = "in flight" /\ call[e].at # "done"
         [] OTHER -> FALSE
    /\ answer = "won" => fails \/ told.end = "performed"
    /\ call'[c].at # "await"
    /\ ends => CASE told.end = "performed" -> by = c /\ told.of = c
                 \* The operator has resolved the key with the answer of the call that had the effect.
                 [] told.end = "replayed" -> \/ by = told.of
                                             \/ by = Operator /\ told.of \in DOMAIN Calls /\ Told(told.of).effect
                 [] told.end = "indeterminate" -> message = "look" /\ answer = "Indeterminate"
                 [] told.end \in {"in flight", "failed"} -> by = None
                 [] told.end = "unknown" -> TRUE
                 [] OTHER -> FALSE   \* An answer that must not be given.

\* Instead of Noted.
Fits(actor, message, answer) ==
    /\ IF Busy = {} /\ Seers # {} THEN actor = CHOOSE c \in Seers : TRUE ELSE Busy \subseteq {actor}
    /\ CASE actor \in Callers  -> Begun(actor) /\ Suits(actor, message, answer)
         [] actor = Operator -> Mode = "at_most_once"
         [] actor = None     -> ~record'.expired   \* No run of chaos is as long as a retention.
         [] OTHER            -> FALSE

---------------------------- \* The events

\* The next event can happen. At the end, there are the effects that the database contains.
Due ==
    IF at < Len(Events) THEN LET c == Events[at + 1] IN Begun(c) => call[c].at = "done"
    ELSE /\ effects[0].perform = IF Effects > 2 THEN 2 ELSE Effects
         /\ \A c \in DOMAIN Calls : Told(c).effect => call[c].at \in {"complete lease", "done"}

Happens ==
    /\ at' = at + 1
    /\ IF at = Len(Events) \/ Begun(Events[at + 1]) THEN UNCHANGED vars
       ELSE LET c == Events[at + 1] IN
            /\ call' = [call EXCEPT ![c] = Called([mode |-> Mode, body |-> Told(c).body])]
            /\ UNCHANGED <<record, written, lock, effects, rest>>

HistoryInit == Init /\ at = 0 /\ which \in DOMAIN Histories /\ lie \in Lies(which)

\* An event happens as soon as it can, because a message that may come before it may also come after it.
HistoryNext ==
    /\ at <= Len(Events) /\ UNCHANGED <<which, lie>>
    /\ IF Due THEN Happens ELSE Next /\ UNCHANGED at

HistorySpec == HistoryInit /\ [][HistoryNext]_<<vars, which, lie, at>>

\* Prints how far each history has come, and each change that is accepted.
ASSUME \A h \in DOMAIN Histories : TLCSet(h, 0)
Reached ==
    IF lie = "none" THEN at <= TLCGet(which) \/ (TLCSet(which, at) /\ PrintT(<<"reached", which, at, Len(Events) + 1>>))
    ELSE at <= Len(Events) \/ PrintT(<<"lie", which, lie>>)
=============================================================================

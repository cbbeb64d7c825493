//! One run of the check. The request is first sent without interruptions, and then with each interruption of each
//! message.

mod cut_off;
mod interrupt;
mod undisturbed;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use clap::ValueEnum as _;
use tokio::time::sleep;

use crate::Error;
use crate::client::{Answer, Caller};
use crate::effects::{Effect, Effects, Reading};
use crate::form::Form;
use crate::judge::{Compare, Expected, Interruption, Verdict};
use crate::proxy::{Event, Place, Proxy, shorten};
use crate::report::{Numbered, Report, Try};
use crate::service::Service;
use crate::talk::Talk;

/// How long the check watches the idle service, before the first request and after it. Job queues usually poll every
/// one or two seconds.
const WATCH: Duration = Duration::from_millis(2_200);
/// How long the database may still work for a request after the service has answered.
const SETTLE: Duration = Duration::from_secs(3);
/// How long the check waits for late effects after the undisturbed tries, and again after the interruptions. A job that
/// a try has enqueued should run within this time.
const LATE: Duration = Duration::from_secs(4);
/// The pause between two readings while the check waits for a promised effect.
const LOOK: Duration = Duration::from_millis(100);
/// The maximum number of further undisturbed requests. The check sends a further request while the messages of the last
/// two requests differ.
const COLD: usize = 5;
/// The maximum number of characters that the report shows of a statement.
const SQL: usize = 110;

pub(crate) struct Options {
    pub(crate) again: Vec<u16>,
    pub(crate) patience: Duration,
    pub(crate) compare: Compare,
    pub(crate) only: Option<(usize, Interruption)>,
    pub(crate) progress: Box<dyn Fn(Progress<'_>)>,
}

/// What the check reports while it runs.
pub(crate) enum Progress<'a> {
    Line(&'a str),
    /// A try with an interruption has ended.
    Tried {
        done: usize,
        all: usize,
        line: &'a str,
    },
}

pub(crate) struct Run<'a> {
    proxy: &'a Proxy,
    caller: &'a dyn Caller,
    service: Option<Service>,
    effects: Effects,
    options: &'a Options,
    expected: Expected,
    places: Vec<Place>,
    /// Whether the service refuses a used key that comes with another body, in a try without an interruption.
    refuses: bool,
    /// An undisturbed request. `None` if a reading shows the effects of all keys.
    alone: Option<Ended>,
    /// The tries whose effects may still change. If a reading shows the effects of all keys, this list contains
    /// only the last try.
    ended: Vec<Ended>,
    report: Report,
}

/// The key of a try, and the readings before and after the try.
struct Ended {
    key: String,
    before: Reading,
    after: Reading,
}

/// The result of an undisturbed request.
struct Plain {
    messages: Vec<(Place, String)>,
    expected: Expected,
    took: Duration,
    ended: Ended,
}

impl<'a> Run<'a> {
    pub(crate) async fn new(
        proxy: &'a Proxy,
        caller: &'a dyn Caller,
        mut service: Option<Service>,
        mut effects: Effects,
        options: &'a Options,
    ) -> Result<Self, Error> {
        let nobody = Talk::new(caller, proxy, &[], Duration::ZERO).key;
        effects.settled(&nobody).await?;
        if let Some(service) = &mut service {
            service.start_first().await?;
        }
        (options.progress)(Progress::Line("watching the idle service"));
        proxy.learn(WATCH).await;
        let expected = Expected { effect: Effect::default(), answer: Answer::new(0, ""), form: None };
        let mut report = Report::default();
        report.service.killed = service.is_some();
        report.service.command = service.as_ref().map(|service| service.command().to_vec()).unwrap_or_default();
        let (places, ended) = (Vec::new(), Vec::new());
        let (refuses, alone) = (false, None);
        Ok(Self { proxy, caller, service, effects, options, expected, places, refuses, alone, ended, report })
    }

    pub(crate) async fn run(mut self) -> Result<Report, Error> {
        self.number().await?;
        if self.options.only.is_none() {
            self.undisturbed().await?;
            // This wait comes before the interruptions, because a process that is killed forgets its jobs.
            self.late().await?;
        } else {
            // `another_body` sets `refuses`, which decides whether a try also sends another body.
            self.another_body().await?;
            self.report.undisturbed.clear();
        }
        self.interrupt_all().await?;
        self.late().await?;
        if let Some(deaths) = self.service.map(|service| service.deaths).filter(|&deaths| deaths > 0) {
            let text = format!("the process ended by itself {deaths} times, and was started again each time");
            self.report.notes.push(text);
        }
        self.report.conclude();
        Ok(self.report)
    }

    fn talk(&self) -> Talk<'a> {
        Talk::new(self.caller, self.proxy, &self.options.again, self.options.patience)
    }

    /// Finds the messages, the effect and the answer of an undisturbed request. Compares two undisturbed requests with
    /// each other.
    async fn number(&mut self) -> Result<(), Error> {
        let nobody = self.talk().key;
        let nothing = self.effects.read(&nobody).await?;
        let cold = self.plain().await?;
        if cold.messages.is_empty() {
            return Err(Error::Unproxied);
        }
        self.proxy.learn(WATCH).await;
        let (mut first, mut second) = (self.plain().await?, self.plain().await?);
        let shapes = |plain: &Plain| plain.messages.iter().map(|(place, _)| place.clone()).collect::<Vec<_>>();
        // On a busy machine, a pool may open another connection, on which the driver prepares its statements anew.
        for _ in 0..COLD {
            if shapes(&first) != shapes(&second) {
                first = std::mem::replace(&mut second, self.plain().await?);
            }
        }
        let unlike = |what: &str, one: &dyn std::fmt::Display, other: &dyn std::fmt::Display| {
            let text = format!("two requests without any interruption differ in their {what}: {one}, and {other}");
            Err(Error::Undisturbed(text))
        };
        let statuses = (first.expected.answer.status, second.expected.answer.status);
        if statuses.0 != statuses.1 {
            return unlike("status", &statuses.0, &statuses.1);
        }
        if !first.expected.effect.equals(&second.expected.effect) {
            return unlike("effect", &first.expected.effect, &second.expected.effect);
        }
        if second.expected.effect.is_none() {
            let text = "the undisturbed request changes nothing that the effects show".to_owned();
            return Err(Error::Undisturbed(text));
        }
        if shapes(&first) != shapes(&second) {
            self.report.notes.push("the messages of two undisturbed requests differ, or their order does".to_owned());
        }
        if first.expected.form != second.expected.form {
            let text =
                "the answers to two undisturbed requests differ in their form, so no form is compared with theirs";
            self.report.notes.push(text.to_owned());
            second.expected.form = None;
        }
        let background = self.proxy.background();
        if background > 0 {
            let text = format!("{background} statements that the idle service sends by itself are not numbered");
            self.report.notes.push(text);
        }
        let is_by_key = self.effects.read(&nobody).await? == nothing;
        self.places = shapes(&second);
        let numbered = second.messages.iter().enumerate();
        self.report.messages =
            numbered.map(|(at, (_, sql))| Numbered { number: at + 1, sql: shorten(sql, SQL) }).collect();
        self.expected = second.expected;
        self.alone = Some(second.ended).filter(|_| is_by_key);
        self.announce(second.took);
        Ok(())
    }

    async fn plain(&mut self) -> Result<Plain, Error> {
        let started = Instant::now();
        let mut talk = self.talk();
        let before = self.before(&talk.key).await?;
        self.proxy.number(None);
        talk.ask("first").await;
        talk.retry().await;
        self.proxy.settle(SETTLE).await;
        let events = self.proxy.finish();
        let after = self.effects.settled(&talk.key).await?;
        let effect = after.since(&before);
        let final_one = talk.finals().first().copied();
        let Some(answer) = final_one.filter(|answer| answer.is_success()) else {
            let told = talk.told.last().map(ToString::to_string).unwrap_or_default();
            if final_one.is_some() {
                return Err(Error::Undisturbed(format!("the undisturbed request fails: {told}")));
            }
            let wrote = self.service.as_ref().map(Service::wrote).unwrap_or_default();
            return Err(Error::Undisturbed(format!(
                "the undisturbed request gets no final answer (--again lists those that are none): {told}{wrote}"
            )));
        };
        let messages = events.into_iter().filter_map(|event| match event {
            Event::Message { place, sql, .. } => Some((place, sql.replace(&talk.key, "{key}"))),
            _ => None,
        });
        let form = (self.options.compare == Compare::Body).then(|| Form::of(answer));
        let expected = Expected { effect, answer: answer.clone(), form };
        let messages = messages.collect();
        Ok(Plain { messages, expected, took: started.elapsed(), ended: Ended { key: talk.key, before, after } })
    }

    /// Reports the number of tries, and the expected time.
    fn announce(&self, took: Duration) {
        let tries = self.plan();
        // A try takes longer than an undisturbed request, because a try retries, repeats the request, and waits for the
        // interruption.
        let kills = tries.iter().filter(|(_, interruption)| *interruption == Interruption::Killed).count();
        let seconds = tries.len() as f64 * (took.as_secs_f64() + 0.25) + kills as f64 + LATE.as_secs_f64();
        let count = self.report.messages.len();
        let killed =
            if self.service.is_some() { "" } else { "; it is not killed, because the check has not started it" };
        let about = humantime::format_duration(Duration::from_secs_f64(seconds.round()));
        let text = format!("{count} messages, {} tries, about {about}{killed}", tries.len());
        (self.options.progress)(Progress::Line(&text));
    }

    fn plan(&self) -> Vec<(usize, Interruption)> {
        let kinds = Interruption::value_variants()
            .iter()
            .copied()
            .filter(|&kind| kind != Interruption::Killed || self.service.is_some());
        let all = kinds.flat_map(|kind| (1..=self.places.len()).map(move |message| (message, kind)));
        let mut plan: Vec<_> = all.filter(|it| self.options.only.is_none_or(|only| only == *it)).collect();
        plan.sort_by_key(|(message, _)| *message);
        plan
    }

    async fn interrupt_all(&mut self) -> Result<(), Error> {
        let plan = self.plan();
        if plan.is_empty()
            && let Some((message, interruption)) = self.options.only
        {
            let (count, name) = (self.places.len(), interruption.name());
            return Err(Error::Argument(format!("there is no try {message}:{name}: the request has {count} messages")));
        }
        let all = plan.len();
        for (done, (message, interruption)) in (1..).zip(plan) {
            let result = self.interrupt(message, interruption).await?;
            let verdict = result.verdict.map_or("not reached".to_owned(), |verdict| verdict.to_string());
            let sql = shorten(&self.report.messages[message - 1].sql, 40);
            let line = format!("{} {verdict} ({sql})", result.place());
            (self.options.progress)(Progress::Tried { done, all, line: &line });
            self.report.tries.push(result);
        }
        Ok(())
    }

    /// Reads the effects before a try. A change since the end of the last try is a late effect of the last try.
    async fn before(&mut self, key: &str) -> Result<Reading, Error> {
        let before = self.effects.read(key).await?;
        if self.alone.is_none()
            && let Some(last) = self.ended.pop()
        {
            let (now, once) = (self.effects.read(&last.key).await?, self.expected.effect.clone());
            self.charge(&last, &now, &once);
        }
        Ok(before)
    }

    /// Waits for late effects, and reads the effects again.
    async fn late(&mut self) -> Result<(), Error> {
        (self.options.progress)(Progress::Line("waiting for late effects"));
        sleep(LATE).await;
        let mut once = self.expected.effect.clone();
        if let Some(alone) = &self.alone {
            once = self.effects.read(&alone.key).await?.since(&alone.before);
            let text = format!("a late change made the effect of an undisturbed request {once}");
            if !once.equals(&self.expected.effect) && !self.report.notes.contains(&text) {
                self.report.notes.push(text);
            }
        }
        for ended in std::mem::take(&mut self.ended) {
            let after = self.effects.read(&ended.key).await?;
            self.charge(&ended, &after, &once);
            self.ended.push(Ended { after, ..ended });
        }
        Ok(())
    }

    /// Attributes a late change of the effects to the try that `ended` describes.
    fn charge(&mut self, ended: &Ended, now: &Reading, once: &Effect) {
        let mut tries = self.report.undisturbed.iter_mut().chain(&mut self.report.tries);
        let Some(it) = tries.find(|it| it.key == ended.key).filter(|_| *now != ended.after) else { return };
        let late = now.since(&ended.before);
        let text = format!("after a late change, the effect is {late} instead of {once}");
        it.effect = late.rows();
        it.story.push(format!("      * {text}"));
        if late.exceeds(once) {
            (it.verdict, it.detail) = (Some(Verdict::TwoEffects), text);
        }
    }

    /// Sends the request again. If a client has already got a successful answer, the whole effect must be committed
    /// without this further request, because a client may stop after such an answer. If the effect is still missing
    /// after `SETTLE`, returns `false` and sends nothing.
    async fn again(&mut self, talk: &mut Talk<'a>, before: &Reading) -> Result<bool, Error> {
        let once = self.expected.effect.clone();
        let is_promised = talk.finals().iter().any(|answer| answer.is_success());
        let is_whole = |effect: &Effect| effect.equals(&once) || effect.exceeds(&once);
        if is_promised && !self.is_kept(talk, before, is_whole).await? {
            return Ok(false);
        }
        talk.ask("again").await;
        Ok(true)
    }

    /// Waits for a promised effect, for at most `SETTLE`. Returns whether the effect is committed.
    async fn is_kept(
        &mut self,
        talk: &Talk<'a>,
        before: &Reading,
        is_there: impl Fn(&Effect) -> bool,
    ) -> Result<bool, Error> {
        let started = Instant::now();
        while !is_there(&self.effects.read(&talk.key).await?.since(before)) {
            if started.elapsed() > SETTLE {
                return Ok(false);
            }
            sleep(LOOK).await;
        }
        Ok(true)
    }

    /// Waits until the effects of the request no longer change. Returns the effects.
    async fn after(&mut self, key: &str, before: Reading, place: &str) -> Result<Effect, Error> {
        if !self.proxy.settle(SETTLE).await {
            let text =
                format!("after {place}, a connection of the service was left in an open transaction, or at work");
            self.report.notes.push(text);
        }
        let after = self.effects.settled(key).await?;
        let effect = after.since(&before);
        self.ended.push(Ended { key: key.to_owned(), before, after });
        Ok(effect)
    }

    /// Describes a try that is over, for the report.
    fn tried(&self, talk: Talk<'a>, verdict: Option<Verdict>, detail: String, effect: &Effect) -> Try {
        Try {
            message: None,
            interruption: None,
            check: None,
            reached: true,
            verdict,
            detail,
            expected: self.expected.effect.rows(),
            effect: effect.rows(),
            story: self.story(&talk.key, self.proxy.finish(), effect),
            key: talk.key,
            answers: talk.told,
        }
    }

    /// Writes the events as lines. Up to the interruption, the messages have the numbers of the undisturbed request.
    fn story(&self, key: &str, events: Vec<Event>, effect: &Effect) -> Vec<String> {
        let numbers: HashMap<_, _> = self.places.iter().enumerate().map(|(at, place)| (place, at + 1)).collect();
        let mut connections = Vec::new();
        let mut is_interrupted = false;
        let line = |event| match event {
            Event::Message { connection, place, sql, mark } => {
                let number = numbers.get(&place).filter(|_| !is_interrupted).map_or(String::new(), ToString::to_string);
                is_interrupted |= !mark.is_empty();
                let known = connections.iter().position(|known| *known == connection);
                let connection = known.unwrap_or_else(|| {
                    connections.push(connection);
                    connections.len() - 1
                });
                // The first connection needs no name.
                let connection =
                    if connection == 0 { String::new() } else { format!("(connection {}) ", connection + 1) };
                let mark = if mark.is_empty() { String::new() } else { format!("   <-- {mark}") };
                format!("{number:>4}  {connection}{}{mark}", shorten(&sql.replace(key, "{key}"), SQL))
            }
            Event::Rejected(what) => format!("      the database: ERROR {}", shorten(&what, SQL)),
            Event::Said(what) => format!("      * {}", what.replace(key, "{key}")),
        };
        let mut story: Vec<_> = events.into_iter().map(line).collect();
        story.push(format!("      * the effect: {effect}; without an interruption: {}", self.expected.effect));
        story
    }
}

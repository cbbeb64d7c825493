//! `console` in a headless browser, as a person uses it: with a mouse, with the keyboard alone, on a narrow screen, in
//! light and dark. Skipped where there is no Chromium or no chromedriver.
//!
//! `CONSOLE_SCREENSHOTS=docs/console cargo test -p idempotency-janitor browser` writes the pictures of src/guide/settle.md.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fantoccini::elements::Element;
use fantoccini::key::Key as Stroke;
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use pg_idempotency::testing::{self, Fixture};
use pg_idempotency::{Key, operator};
use serde_json::json;
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::console::Console;
use crate::support::{AT_LEAST_ONCE, AT_MOST_ONCE, in_doubt, lapsed};

/// Runs the driver and its browsers in a session and a home of their own. Both go when the test's end
/// of the pipe is closed, and that is also when the test panics or is killed.
const SUPERVISOR: &str = r#"
    trap '' HUP INT TERM
    HOME=$(mktemp -d "${TMPDIR:-/tmp}/pgi-browser.XXXXXX") || exit 1
    export HOME TMPDIR="$HOME" XDG_CONFIG_HOME="$HOME" XDG_CACHE_HOME="$HOME" XDG_RUNTIME_DIR="$HOME"
    setsid "$1" --port=0 </dev/null >"$HOME/said" 2>&1 &
    driver=$!
    while kill -0 "$driver"; do
        port=$(sed -n 's/.*started successfully on port \([0-9]*\).*/\1/p' "$HOME/said")
        [ "$port" ] && echo "$port" && break
        sleep 0.1
    done
    cat >/dev/null
    kill -KILL "-$driver"
    wait
    # A process that is being killed may still write.
    for _ in 1 2 3 4 5 6 7 8 9; do rm -rf "$HOME" 2>/dev/null && break; sleep 0.1; done
"#;

/// For a page, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// chromedriver, which starts the browsers.
struct Driver {
    supervisor: Child,
    url: String,
    chromium: PathBuf,
}

impl Driver {
    /// `None` where something is missing, which is said.
    fn start() -> anyhow::Result<Option<Self>> {
        let (Some(chromium), Some(driver)) = (
            program(&["chromium", "chromium-browser", "google-chrome"]),
            program(&["chromedriver"]).filter(|_| program(&["setsid"]).is_some()),
        ) else {
            println!("skipped: there is no chromium, chromedriver or setsid in PATH");
            return Ok(None);
        };
        let mut command = Command::new("sh");
        command.args(["-c", SUPERVISOR, "supervisor"]).arg(driver).stdin(Stdio::piped()).stdout(Stdio::piped());
        // A test runner that is killed takes its group with it, and the supervisor is to clean up.
        let mut supervisor = command.process_group(0).spawn()?;
        let mut port = String::new();
        BufReader::new(supervisor.stdout.take().expect("piped")).read_line(&mut port)?;
        anyhow::ensure!(!port.is_empty(), "chromedriver does not start");
        Ok(Some(Self { supervisor, url: format!("http://127.0.0.1:{}", port.trim()), chromium }))
    }

    async fn browser(&self, look: Look) -> anyhow::Result<Client> {
        // 1 is light, 0 is dark. A browser as root needs --no-sandbox.
        let scheme = format!("--blink-settings=preferredColorScheme={}", u8::from(look != Look::Dark));
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--window-size=1200,1150",
            &scheme,
        ];
        let mut options = json!({"binary": self.chromium, "args": arguments});
        if look == Look::Narrow {
            options["mobileEmulation"] = json!({"deviceMetrics": {"width": 360, "height": 740, "pixelRatio": 1.0}});
        }
        let capabilities = serde_json::Map::from_iter([
            ("goog:chromeOptions".to_owned(), options),
            ("timeouts".to_owned(), json!({"pageLoad": 30_000, "script": 30_000})),
        ]);
        Ok(ClientBuilder::new(HttpConnector::new()).capabilities(capabilities).connect(&self.url).await?)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        drop(self.supervisor.stdin.take());
        let _ = self.supervisor.wait();
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    Light,
    Dark,
    Narrow,
}

fn program(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let directories: Vec<_> = std::env::split_paths(&path).collect();
    names
        .iter()
        .flat_map(|name| directories.iter().map(move |directory| directory.join(name)))
        .find(|path| path.is_file())
}

/// The page as text, once it contains this. A click returns before its page is there.
async fn seen(browser: &Client, text: &str) -> anyhow::Result<String> {
    let mut page = String::new();
    let started = std::time::Instant::now();
    while started.elapsed() < PATIENCE {
        if let Ok(body) = browser.find(Locator::Css("body")).await
            && let Ok(now) = body.text().await
        {
            page = now;
            if page.contains(text) {
                return Ok(page);
            }
        }
    }
    anyhow::bail!("{text:?} is not on the page: {page}")
}

async fn click(browser: &Client, what: &str) -> anyhow::Result<()> {
    let xpath = format!(
        "//*[self::a or self::button][normalize-space(.)='{what}'] | //label[starts-with(normalize-space(.), '{what}')]"
    );
    browser.wait().at_most(PATIENCE).for_element(Locator::XPath(&xpath)).await?.click().await?;
    Ok(())
}

async fn type_into(browser: &Client, name: &str, text: &str) -> anyhow::Result<()> {
    browser.find(Locator::Css(&format!("main [name={name}]:not([type=hidden])"))).await?.send_keys(text).await?;
    Ok(())
}

/// From any page to the page of a key.
async fn look_up(browser: &Client, url: &str, key: &Key) -> anyhow::Result<()> {
    browser.goto(url).await?;
    for (name, part) in [("scope", key.scope()), ("operation", key.operation())] {
        type_into(browser, name, part).await?;
    }
    // A driver cannot type beyond the basic plane.
    let field = browser.find(Locator::Css("[name=value]")).await?;
    let set = "arguments[0].value = arguments[1]";
    browser.execute(set, vec![serde_json::to_value(field)?, json!(key.value())]).await?;
    click(browser, "Show it").await?;
    seen(browser, "Attempt").await?;
    Ok(())
}

async fn decide(browser: &Client, action: &str, response: Option<&str>, reason: &str) -> anyhow::Result<()> {
    click(browser, action).await?;
    if let Some(response) = response {
        type_into(browser, "response", response).await?;
    }
    type_into(browser, "reason", reason).await?;
    type_into(browser, "operator", "Ada").await?;
    click(browser, "Continue").await?;
    seen(browser, "Are you sure?").await?;
    Ok(())
}

/// Nothing is wider than the screen, and nothing ran that the page brought along.
async fn assert_sound(browser: &Client) -> anyhow::Result<()> {
    let wider = "return document.documentElement.scrollWidth > document.documentElement.clientWidth";
    assert_eq!(browser.execute(wider, Vec::new()).await?, json!(false), "{}", browser.current_url().await?);
    let injected = "return document.querySelectorAll('script, img, iframe, object').length + (window.hacked ? 1 : 0)";
    assert_eq!(browser.execute(injected, Vec::new()).await?, json!(0));
    Ok(())
}

/// Into the directory that is asked for. A picture of one colour is a page that was not drawn.
async fn picture(browser: &Client, name: &str) -> anyhow::Result<()> {
    let picture = browser.screenshot().await?;
    assert!((4_000..150_000).contains(&picture.len()), "{name}: {}", picture.len());
    if let Some(directory) = std::env::var_os("CONSOLE_SCREENSHOTS") {
        let directory = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(directory);
        std::fs::create_dir_all(&directory)?;
        std::fs::write(directory.join(format!("{name}.png")), picture)?;
    }
    Ok(())
}

async fn state(pool: &PgPool, key: &Key) -> anyhow::Result<Option<String>> {
    Ok(operator::show(pool, key).await?.map(|shown| shown.state.to_string()))
}

fn key(operation: &str, value: &str) -> Key {
    Key::new("tenant:17", operation, value).expect("a valid key")
}

struct Keys {
    paid: Key,
    refused: Key,
    again: Key,
    ride: Key,
    poison: Key,
}

/// A table as it may be, with five keys that wait.
async fn fill(pool: &PgPool) -> anyhow::Result<Keys> {
    let keys = Keys {
        paid: key("POST /payments", "0b7f7a52-8a0c-4d0e-9f5e-1c1f8e5b2a10"),
        refused: key("POST /payments", "5a1d93c2-8f6e-4a34-9f50-0f0b9f1c9a11"),
        again: key("POST /orders", "c1f0ce3e-31a7-4bb1-8d3f-3f0a7f3b9d12"),
        ride: key("POST /rides", "e7a4e9d0-64a8-4c59-b5c1-2b8d5c1f4a13"),
        poison: key("order.created", "order-17"),
    };
    lapsed(pool, &keys.paid, AT_MOST_ONCE).await?;
    lapsed(pool, &keys.refused, AT_MOST_ONCE).await?;
    Fixture::indeterminate(&keys.again, "body")?.write(pool).await?;
    in_doubt(pool, &keys.ride).await?;
    for _ in 0..5 {
        lapsed(pool, &keys.poison, AT_LEAST_ONCE).await?;
    }
    let refusal = "update idempotency.record set last_error = 'the gateway closed the connection' where operation <> 'POST /orders'";
    sqlx::query(refusal).execute(pool).await?;
    for (hours, of) in [(30, &keys.paid), (5, &keys.refused), (3, &keys.again), (2, &keys.ride), (1, &keys.poison)] {
        sqlx::query("update idempotency.record set claimed_at = now() - $1 * interval '1 h' where value = $2")
            .bind(hours)
            .bind(of.value())
            .execute(pool)
            .await?;
    }
    for n in 0..40_i64 {
        let done = key("POST /payments", &format!("completed-{n}"));
        Fixture::completed(&done, "body", &n)?.write(pool).await?;
        testing::age(pool, &done, Duration::from_secs(n as u64 * 1500)).await?;
        let event = key("event", &n.to_string());
        Fixture::marked(&event).write(pool).await?;
        testing::age(pool, &event, Duration::from_secs(n as u64 * 100)).await?;
    }
    Ok(keys)
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_person_lists_opens_and_settles_keys(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let Some(driver) = Driver::start()? else { return Ok(()) };
    let pool = PgPool::connect_with(options.clone()).await?;
    let keys = fill(&pool).await?;
    let console = Console::start(&options, &["--max-attempts", "5"]);
    let browser = driver.browser(Look::Light).await?;
    browser.goto(&console.url).await?;
    assert_sound(&browser).await?;
    picture(&browser, "overview").await?;
    click(&browser, "Waiting for a person").await?;
    seen(&browser, "1 to 5 of 5").await?;
    assert_sound(&browser).await?;
    picture(&browser, "waiting").await?;

    // From the list, the oldest first.
    browser.find(Locator::Css("tbody a")).await?.click().await?;
    let page = seen(&browser, "0b7f… (36 bytes)").await?;
    assert!(!page.contains(keys.paid.value()), "{page}");
    click(&browser, "Show it all").await?;
    seen(&browser, keys.paid.value()).await?;
    decide(&browser, "It took effect", Some("{\"payment\": 4711}"), "ticket 1: the gateway has charge ch_9").await?;
    let page = seen(&browser, "every repeat gets this response").await?;
    assert!(page.contains(keys.paid.value()), "{page}");
    click(&browser, "Yes").await?;
    seen(&browser, "resolved: Key").await?;
    assert_eq!(state(&pool, &keys.paid).await?.as_deref(), Some("completed"));
    click(&browser, "This key").await?;
    click(&browser, "Show it").await?;
    seen(&browser, "\"payment\": 4711").await?;

    // Two operators: the other one was faster.
    let other = driver.browser(Look::Light).await?;
    for operator in [&browser, &other] {
        look_up(operator, &console.url, &keys.refused).await?;
        decide(operator, "It took no effect", None, "ticket 2: the gateway knows no such charge").await?;
    }
    click(&other, "Yes").await?;
    seen(&other, "released: Key").await?;
    click(&browser, "Yes").await?;
    seen(&browser, "nothing was done: the record has changed since it was shown").await?;
    click(&browser, "The key as it is now").await?;
    seen(&browser, "released").await?;
    other.close().await?;

    look_up(&browser, &console.url, &keys.ride).await?;
    let page = seen(&browser, "in doubt").await?;
    assert!(page.contains("ride") && page.contains("finished"), "{page}");
    picture(&browser, "step-in-doubt").await?;
    decide(&browser, "The step in doubt took effect", Some("\"sms-17\""), "ticket 3").await?;
    click(&browser, "Yes").await?;
    seen(&browser, "resolved: the step \"text\"").await?;
    look_up(&browser, &console.url, &keys.again).await?;
    decide(&browser, "Forget it", None, "ticket 4").await?;
    click(&browser, "No, go back").await?;
    seen(&browser, "What happened?").await?;
    assert_eq!(state(&pool, &keys.again).await?.as_deref(), Some("indeterminate"));
    decide(&browser, "Forget it", None, "ticket 4").await?;
    click(&browser, "Yes").await?;
    seen(&browser, "forgotten: Key").await?;
    assert_eq!(state(&pool, &keys.again).await?, None);
    click(&browser, "The keys that wait").await?;
    let page = seen(&browser, "1 to 1 of 1").await?;
    assert!(page.contains("exhausted"), "{page}");
    browser.close().await?;
    Ok(())
}

/// Keys, errors and responses are other people's text.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn hostile_keys_are_shown_as_they_are_and_run_nothing(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let Some(driver) = Driver::start()? else { return Ok(()) };
    let pool = PgPool::connect_with(options.clone()).await?;
    let script = "\"><script>window.hacked=1</script><img src=x onerror=window.hacked=1>";
    let emoji = "🦀".repeat(63) + "abc";
    assert_eq!(emoji.len(), 255);
    let hostile = [
        (Key::new(script, script, script)?, script),
        (Key::new("tenant:17", "POST /texts", "pay 001\u{202e}000 to\u{200b}me")?, r"pay 001\u{202e}000 to\u{200b}me"),
        (Key::new(&*emoji, &*emoji, &*emoji)?, &*emoji),
        (Key::new("{{7*7}}&amp;", "a?b=c#d/../e", "%00%3Cb%3E+ ' \\")?, r"%00%3Cb%3E+ ' \\"),
    ];
    let console = Console::start(&options, &[]);
    for (look, decides) in [(Look::Narrow, false), (Look::Light, true)] {
        let browser = driver.browser(look).await?;
        for (key, visible) in &hostile {
            Fixture::indeterminate(key, "body")?.with_last_error(script).write(&pool).await?;
            browser.goto(&format!("{}/waiting", console.url)).await?;
            assert_sound(&browser).await?;
            look_up(&browser, &console.url, key).await?;
            assert_sound(&browser).await?;
            click(&browser, "Show it all").await?;
            seen(&browser, visible).await?;
            decide(&browser, "It took no effect", None, script).await?;
            assert_sound(&browser).await?;
            seen(&browser, visible).await?;
            if decides {
                click(&browser, "Yes").await?;
                seen(&browser, "released: Key").await?;
                assert_sound(&browser).await?;
                assert_eq!(state(&pool, key).await?.as_deref(), Some("released"));
            } else {
                sqlx::query("delete from idempotency.record").execute(&pool).await?;
            }
        }
        browser.close().await?;
    }
    let answered = key("POST /texts", "an answer");
    Fixture::completed(&answered, "body", &script)?.write(&pool).await?;
    let browser = driver.browser(Look::Light).await?;
    look_up(&browser, &console.url, &answered).await?;
    click(&browser, "Show it").await?;
    seen(&browser, "<script>window.hacked=1</script>").await?;
    assert_sound(&browser).await?;
    browser.close().await?;
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn it_fits_a_narrow_screen_and_a_dark_one(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let Some(driver) = Driver::start()? else { return Ok(()) };
    let pool = PgPool::connect_with(options.clone()).await?;
    let keys = fill(&pool).await?;
    let console = Console::start(&options, &["--max-attempts", "5"]);
    let mut backgrounds = Vec::new();
    for look in [Look::Light, Look::Dark, Look::Narrow] {
        let browser = driver.browser(look).await?;
        for path in ["/waiting", "/", "/nowhere"] {
            browser.goto(&format!("{}{path}", console.url)).await?;
            assert_sound(&browser).await?;
        }
        look_up(&browser, &console.url, &keys.ride).await?;
        assert_sound(&browser).await?;
        let colour = "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]";
        backgrounds.push(browser.execute(colour, Vec::new()).await?);
        browser.close().await?;
    }
    assert_eq!(backgrounds[0], json!(["rgb(255, 255, 255)", "rgb(28, 32, 36)"]));
    assert_eq!(backgrounds[1], json!(["rgb(21, 25, 29)", "rgb(230, 233, 236)"]));
    Ok(())
}

/// Presses Tab until this element has the focus.
async fn tab_to(browser: &Client, what: &str) -> anyhow::Result<Element> {
    for _ in 0..60 {
        browser.active_element().await?.send_keys(&Stroke::Tab.to_string()).await?;
        let there = format!(
            "return document.activeElement.matches(\"{what}\") && document.activeElement.matches(':focus-visible')"
        );
        if browser.execute(&there, Vec::new()).await? == json!(true) {
            return Ok(browser.active_element().await?);
        }
    }
    anyhow::bail!("{what} cannot be reached with the keyboard")
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_keyboard_alone_is_enough(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let Some(driver) = Driver::start()? else { return Ok(()) };
    let pool = PgPool::connect_with(options.clone()).await?;
    let keys = fill(&pool).await?;
    let console = Console::start(&options, &[]);
    let browser = driver.browser(Look::Light).await?;
    let enter = Stroke::Enter.to_string();
    browser.goto(&console.url).await?;
    tab_to(&browser, "nav a[href='/waiting']").await?.send_keys(&enter).await?;
    seen(&browser, "the oldest claim first").await?;
    tab_to(&browser, "tbody a").await?.send_keys(&enter).await?;
    seen(&browser, "0b7f… (36 bytes)").await?;
    tab_to(&browser, "[name=action]").await?.send_keys(" ").await?;
    tab_to(&browser, "[name=response]").await?.send_keys("{\"payment\": 1}").await?;
    tab_to(&browser, "[name=reason]").await?.send_keys("ticket 5").await?;
    tab_to(&browser, "[name=operator]").await?.send_keys("Grace").await?;
    tab_to(&browser, "main button").await?.send_keys(&enter).await?;
    seen(&browser, "Are you sure?").await?;
    tab_to(&browser, "main button").await?.send_keys(&enter).await?;
    seen(&browser, "resolved: Key").await?;
    assert_eq!(state(&pool, &keys.paid).await?.as_deref(), Some("completed"));
    browser.close().await?;
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_pages_of_a_long_list_keep_its_filter(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let Some(driver) = Driver::start()? else { return Ok(()) };
    let pool = PgPool::connect_with(options.clone()).await?;
    for n in 0..56 {
        let operation = if n == 0 { "POST /orders" } else { "POST /payments" };
        Fixture::indeterminate(&key(operation, &n.to_string()), "body")?.write(&pool).await?;
    }
    let console = Console::start(&options, &[]);
    let browser = driver.browser(Look::Light).await?;
    browser.goto(&format!("{}/waiting", console.url)).await?;
    seen(&browser, "1 to 50 of 56").await?;
    type_into(&browser, "operation", "POST /payments").await?;
    click(&browser, "Filter").await?;
    seen(&browser, "1 to 50 of 55").await?;
    click(&browser, "Later").await?;
    seen(&browser, "51 to 55 of 55").await?;
    click(&browser, "Earlier").await?;
    seen(&browser, "1 to 50 of 55").await?;
    browser.close().await?;
    Ok(())
}

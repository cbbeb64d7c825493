//! The console, while its database goes silent: nothing is refused and nothing is answered, and no connection is
//! closed.

use std::time::{Duration, Instant};

use rig::database::until_blocked;
use rig::proxy::Proxy;
use sqlx::PgPool;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::console::Console;

type Page = reqwest::Result<(u16, String)>;

const PATIENCE: Duration = Duration::from_secs(30);

/// A console behind a network that vanishes.
struct Silent {
    pool: PgPool,
    network: Proxy,
    console: Console,
}

impl Silent {
    /// So many clients ask for a page, and the network vanishes while the server works on each of them.
    async fn with_pages(pool: PgPool, count: usize) -> anyhow::Result<(Self, JoinSet<Page>)> {
        let network = Proxy::before(&pool.connect_options()).await?;
        let silent = Self { pool, console: Console::at(&network.options, &[]), network };
        // The first sample of the console must not be one of the blocked statements.
        silent.page().await?;
        until_nothing_runs(&silent.pool).await?;
        let mut lock = silent.pool.begin().await?;
        sqlx::query("lock table idempotency.record").execute(&mut *lock).await?;
        let pages: JoinSet<_> = (0..count).map(|_| silent.page()).collect();
        until_blocked(&silent.pool, i64::try_from(count)?).await?;
        silent.network.vanish();
        lock.rollback().await?;
        Ok((silent, pages))
    }

    fn page(&self) -> impl Future<Output = Page> + Send + 'static {
        let url = self.console.url.clone();
        async move {
            let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build()?;
            let answer = client.get(&url).send().await?;
            Ok((answer.status().as_u16(), answer.text().await?))
        }
    }
}

async fn until_nothing_runs(pool: &PgPool) -> anyhow::Result<()> {
    let others = "select count(*) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle'";
    while sqlx::query_scalar::<_, i64>(others).fetch_one(pool).await? > 0 {
        sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_page_says_that_the_database_does_not_answer(pool: PgPool) -> anyhow::Result<()> {
    let (_silent, mut pages) = Silent::with_pages(pool, 1).await?;
    let (status, text) = pages.join_next().await.expect("one page")??;
    assert_eq!(status, 503, "{text}");
    let says = ["the server gave no answer", "the server did not answer"];
    assert!(says.iter().any(|says| text.contains(says)), "{text}");
    Ok(())
}

/// A connection that never answers must not keep its place in the pool, which has four, after its page has given up.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn pages_that_were_left_in_the_silence_take_no_place_of_later_ones(pool: PgPool) -> anyhow::Result<()> {
    let (silent, mut pages) = Silent::with_pages(pool, 4).await?;
    pages.shutdown().await;
    let (status, text) = silent.page().await?;
    assert_eq!(status, 503, "{text}");
    silent.network.mend();
    let mended = Instant::now();
    while silent.page().await?.0 != 200 {
        assert!(mended.elapsed() < PATIENCE, "no page works any more");
    }
    Ok(())
}

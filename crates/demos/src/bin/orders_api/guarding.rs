//! What stands in front of the key: authentication, then the size, then the signature.

use reqwest::Method;

use crate::client::Client;
use crate::phone::{answer, ride};
use crate::server::BODY_LIMIT;
use crate::story::Story;

pub(crate) async fn tell(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    refused_before_the_key(client, story).await?;
    revoked(client, story).await
}

/// Each is wrong in all that comes after its own mistake too, and hears of the first.
async fn refused_before_the_key(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    story.scene("The order: who, how much, by whose hand, and only then the key");
    let lea = client.passenger("lea").await?;
    let mut stranger = lea.clone();
    stranger.token = "guessed".to_owned();
    let too_much = ride(&"x".repeat(BODY_LIMIT));
    let forged = |body: &str| lea.request(Method::POST, "/orders", "", &ride("elsewhere")).body(body.to_owned());

    let unknown = stranger.send(Method::POST, "/orders", "", &too_much).await;
    story.check("a stranger, with too large a body and no key", unknown, "401 unknown-token");
    story.check("a passenger, with the same", answer(forged(&too_much)).await, "413 too-large");
    story.check("with a forged signature", answer(forged(&ride("station"))).await, "403 bad-signature");
    let keyless = lea.send(Method::POST, "/orders", "", &ride("station")).await;
    story.check("with his own, and an empty key", keyless, "400 malformed-key");
    story.check("keys that were taken", client.keys(&lea.passenger).await?, 0);
    story.check("orders", client.orders(&lea.passenger).await?, 0);
    Ok(())
}

async fn revoked(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    story.scene("A replay is for those who may ask");
    let (mia, noa) = (client.passenger("mia").await?, client.passenger("noa").await?);
    let first = mia.order("the-same-key", "clinic").await;
    story.check("a taxi to the clinic", &first, "201");
    story.check("another passenger, with the same key", noa.order("the-same-key", "clinic").await, "201");
    client.revoke(&mia.passenger).await?;
    let again = mia.order("the-same-key", "clinic").await;
    story.check("the retry, with a token that was revoked", &again, "401 unknown-token");
    story.check("and it is told of the clinic", again.text.contains("clinic"), false);
    Ok(())
}

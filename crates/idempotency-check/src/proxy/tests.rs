use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::wire::{Address, Message};

use super::*;

const STARTUP: [u8; 9] = [0, 0, 0, 9, 0, 3, 0, 0, 0];

/// A server that answers each query with CommandComplete and ReadyForQuery, and reports the queries that it received.
async fn server() -> (Upstream, mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let (tell, told) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let tell = tell.clone();
            tokio::spawn(async move {
                Message::read_first(&mut client).await.expect("a start-up");
                let ready = Message::new(b'Z', b"I");
                client.write_all(ready.bytes()).await.expect("written");
                while let Ok(message) = Message::read(&mut client).await {
                    let _ = tell.send(message.sql().unwrap_or_default().into_owned());
                    let complete = Message::new(b'C', b"SELECT 1\0");
                    let _ = client.write_all(&[complete.bytes(), ready.bytes()].concat()).await;
                }
                let _ = tell.send("end".to_owned());
            });
        }
    });
    (Upstream::plain(Address::Tcp("127.0.0.1".to_owned(), port)), told)
}

fn query(sql: &str) -> Vec<u8> {
    Message::new(b'Q', format!("{sql}\0").as_bytes()).bytes().to_vec()
}

/// Sends three queries at once, with a trap at the second query. Returns the number of answers, and the queries that
/// the server received.
async fn three(cut: Cut, then: Option<Then>) -> (usize, Vec<String>) {
    let (upstream, mut told) = server().await;
    let proxy = Proxy::open(([127, 0, 0, 1], 0).into(), upstream).await.expect("a port");
    let place = Place { shape: "select ? from b".to_owned(), occurrence: 1 };
    proxy.number(Some(Trap { place, cut }));
    let mut client = TcpStream::connect(("127.0.0.1", proxy.port())).await.expect("connected");
    client.write_all(&STARTUP).await.expect("written");
    assert!(Message::read(&mut client).await.expect("ready").ready().is_some());
    client
        .write_all(&[query("select 1 from a"), query("select 2 from b"), query("select 3 from c")].concat())
        .await
        .expect("written");
    if let Some(then) = then {
        proxy.fired().await;
        proxy.let_go(then);
    }
    let mut answers = 0;
    while answers < 3 {
        match Message::read(&mut client).await {
            Ok(message) if message.kind() == b'C' => {
                assert!(Message::read(&mut client).await.is_ok_and(|it| it.ready().is_some()))
            }
            Ok(message) => panic!("{message:?}"),
            Err(_) => break,
        }
        answers += 1;
    }
    // After the last complete answer, the client receives only the end of the stream.
    client.shutdown().await.ok();
    let mut rest = Vec::new();
    let _ = client.read_to_end(&mut rest).await;
    assert!(rest.is_empty(), "{rest:?}");
    let mut asked = Vec::new();
    while let Some(sql) = told.recv().await.filter(|sql| sql != "end") {
        asked.push(sql);
    }
    (answers, asked)
}

#[tokio::test]
async fn a_message_that_is_lost_before_never_arrives() {
    // The answer to the first query may be lost with the connection.
    let (answers, asked) = three(Cut::Before, None).await;
    assert!(answers <= 1);
    assert_eq!(asked, ["select 1 from a"]);
}

#[tokio::test]
async fn a_message_that_is_lost_after_is_executed_and_its_answer_never_arrives() {
    assert_eq!(three(Cut::After, None).await, (1, vec!["select 1 from a".to_owned(), "select 2 from b".to_owned()]));
}

#[tokio::test]
async fn a_message_that_is_held_goes_on_or_is_orphaned() {
    let (answers, asked) = three(Cut::Hold, Some(Then::Pass)).await;
    assert_eq!((answers, asked.len()), (3, 3));
    let (answers, asked) = three(Cut::Hold, Some(Then::Orphan)).await;
    assert_eq!((answers, asked.len()), (1, 2));
}
